import torch
import torch.nn as nn
import torch.nn.functional as F


class CosineCausalAttention(nn.Module):
    """Query-key normalisation (Henry et al. 2020): cosine similarity with a learned gain g."""

    def __init__(self, n_embd, n_head, seq_len_hint=1024, dropout=0.0):
        super().__init__()
        self.n_head = n_head
        self.attn = nn.Linear(n_embd, 3 * n_embd, bias=False)
        self.proj = nn.Linear(n_embd, n_embd, bias=False)
        self.drop = nn.Dropout(dropout)
        g0 = torch.log2(torch.tensor(float(seq_len_hint ** 2 - seq_len_hint)))
        self.g = nn.Parameter(g0)

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = (t.reshape(B, T, self.n_head, -1) for t in self.attn(x).chunk(3, dim=-1))
        q = F.normalize(q)
        k = F.normalize(k)

        scores = self.g * torch.einsum("bthd,bshd->bhts", q, k)
        mask = torch.triu(torch.ones(T, T, device=x.device, dtype=torch.bool), diagonal=1)
        scores = scores.masked_fill(mask, float("-inf"))
        p = self.drop(F.softmax(scores, dim=-1))
        y = torch.einsum("bhts,bshd->bthd", p, v).reshape(B, T, C)
        return self.proj(y)
