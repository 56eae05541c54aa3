from math import sqrt

import torch
import torch.nn as nn


class PrefixLMAttention(nn.Module):
    """
    Self attention for "read the prompt both ways, then write left to right".

    Parameters
    ----------
    size : int
        model width
    n_heads : int
    max_len : int
        longest prompt + continuation

    Inputs
    ------
    h : [batch, time, size]
    prompt_len : [batch], how many of the first tokens are prompt. Prompt
        tokens attend to the full prompt, later tokens to everything up to
        and including themselves.
    """

    def __init__(self, size, n_heads, max_len=512, drop=0.0):
        super().__init__()
        self.n_heads = n_heads
        self.per_head = size // n_heads
        self.query = nn.Linear(size, size)
        self.key = nn.Linear(size, size)
        self.value = nn.Linear(size, size)
        self.final = nn.Linear(size, size)
        self.pos = nn.Embedding(max_len, size)
        self.drop = nn.Dropout(drop)
        tri = torch.tril(torch.ones(max_len, max_len, dtype=torch.bool))
        self.register_buffer("tri", tri, persistent=False)

    def build_mask(self, prompt_len, time):
        idx = torch.arange(time, device=prompt_len.device)
        is_prompt = idx.unsqueeze(0) < prompt_len.unsqueeze(1)
        open_part = is_prompt.unsqueeze(2)
        return (self.tri[:time, :time].unsqueeze(0) | open_part).unsqueeze(1)

    def _heads(self, t):
        return t.unflatten(-1, (self.n_heads, self.per_head)).transpose(1, 2)

    def forward(self, h, prompt_len):
        time = h.size(1)
        h = h + self.pos.weight[:time]
        q, k, v = self._heads(self.query(h)), self._heads(self.key(h)), self._heads(self.value(h))
        logits = torch.matmul(q, k.mT) / sqrt(self.per_head)
        logits = logits.masked_fill(~self.build_mask(prompt_len, time), -torch.inf)
        probs = self.drop(logits.softmax(dim=-1))
        return self.final(torch.matmul(probs, v).transpose(1, 2).flatten(2))


if __name__ == "__main__":
    m = PrefixLMAttention(48, 4)
    out = m(torch.randn(2, 20, 48), torch.tensor([6, 11]))
    print(out.shape)
