import torch
import torch.nn as nn
import torch.nn.functional as F


class MixedHead(nn.Module):
    def __init__(self, n_embd, head_size, window):
        super().__init__()
        self.q = nn.Linear(n_embd, head_size, bias=False)
        self.k = nn.Linear(n_embd, head_size, bias=False)
        self.v = nn.Linear(n_embd, head_size, bias=False)
        self.window = window

    def forward(self, x):
        T = x.size(1)
        q, k, v = self.q(x), self.k(x), self.v(x)
        i = torch.arange(T, device=x.device)
        gap = i[:, None] - i[None, :]
        visible = gap >= 0
        if self.window is not None:
            visible = visible & (gap < self.window)
        w = torch.baddbmm(torch.zeros(1, 1, 1, device=x.device, dtype=x.dtype), q, k.mT, beta=0, alpha=k.size(-1) ** -0.5)
        w = torch.where(visible, w, torch.full_like(w, float("-inf")))
        return F.softmax(w, dim=-1) @ v


class UnevenHeads(nn.Module):
    """Every head has its own size and its own look-back (None: everything)."""

    def __init__(self, n_embd=48, sizes=(8, 8, 16, 16), windows=(4, 8, 16, None), dropout=0.0):
        super().__init__()
        self.heads = nn.ModuleList(MixedHead(n_embd, s, w) for s, w in zip(sizes, windows))
        self.proj = nn.Linear(sum(sizes), n_embd)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        out = torch.cat([h(x) for h in self.heads], dim=-1)
        return self.dropout(self.proj(out))
