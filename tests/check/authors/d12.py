"""Luong-style global attention for an LSTM decoder with a copy head."""
import torch
import torch.nn as nn
import torch.nn.functional as F


class GlobalAttention(nn.Module):
    """method is one of "dot", "general", "concat".

    forward(dec, memory, src_mask) takes all decoder steps at once:
        dec       [B, T, H]
        memory    [B, S, H]
        src_mask  [B, S] bool, True = real source token
    and gives the attentional vectors [B, T, H] and the alignments [B, T, S]
    from which the copy head spreads probability over the source tokens.
    """

    def __init__(self, hidden, method="general"):
        super().__init__()
        self.method = method
        if method == "general":
            self.W_a = nn.Linear(hidden, hidden, bias=False)
        elif method == "concat":
            self.W_a = nn.Linear(2 * hidden, hidden, bias=False)
            self.v_a = nn.Parameter(torch.empty(hidden).uniform_(-0.1, 0.1))
        elif method != "dot":
            raise ValueError(method)
        self.W_c = nn.Linear(2 * hidden, hidden, bias=False)

    def score(self, dec, memory):
        if self.method == "dot":
            return torch.bmm(dec, memory.transpose(1, 2))
        if self.method == "general":
            return torch.bmm(dec, self.W_a(memory).transpose(1, 2))
        T, S = dec.size(1), memory.size(1)
        pair = torch.cat(
            [dec.unsqueeze(2).expand(-1, -1, S, -1), memory.unsqueeze(1).expand(-1, T, -1, -1)],
            dim=-1,
        )
        return torch.tanh(self.W_a(pair)) @ self.v_a

    def forward(self, dec, memory, src_mask=None):
        scores = self.score(dec, memory)
        align = F.softmax(scores, dim=-1)
        weights = align
        if src_mask is not None:
            scores = scores.masked_fill(~src_mask.unsqueeze(1), float("-inf"))
            weights = F.softmax(scores, dim=-1)
        context = torch.bmm(weights, memory)
        attentional = torch.tanh(self.W_c(torch.cat([context, dec], dim=-1)))
        return attentional, align


def copy_distribution(align, src_ids, vocab_size):
    """Sum the alignment of equal source ids: [B, T, V]."""
    B, T, S = align.shape
    out = align.new_zeros(B, T, vocab_size)
    return out.scatter_add(2, src_ids.unsqueeze(1).expand(B, T, S), align)


if __name__ == "__main__":
    attn = GlobalAttention(32, "concat")
    mask = torch.arange(7)[None] < torch.tensor([[7], [5]])
    vec, al = attn(torch.randn(2, 4, 32), torch.randn(2, 7, 32), mask)
    print(vec.shape, copy_distribution(al, torch.randint(0, 50, (2, 7)), 50).shape)
