import torch
from torch import nn


class SeqFirstSelfAttention(nn.Module):
    """Decoder self attention, sequence first: input and output are (T, B, C).

    Scores are kept as (key, query, batch, head), so the normalisation runs
    over the first axis.
    """

    def __init__(self, n_embd: int, n_head: int, p_drop: float = 0.0):
        super().__init__()
        self.h = n_head
        self.dk = n_embd // n_head
        self.wq = nn.Parameter(torch.randn(n_embd, n_head, self.dk) * n_embd ** -0.5)
        self.wk = nn.Parameter(torch.randn(n_embd, n_head, self.dk) * n_embd ** -0.5)
        self.wv = nn.Parameter(torch.randn(n_embd, n_head, self.dk) * n_embd ** -0.5)
        self.wo = nn.Parameter(torch.randn(n_head, self.dk, n_embd) * n_embd ** -0.5)
        self.drop = nn.Dropout(p_drop)

    def forward(self, x):
        q = torch.einsum("tbc,chd->tbhd", x, self.wq)
        k = torch.einsum("tbc,chd->tbhd", x, self.wk) * self.dk ** -0.5
        v = torch.einsum("tbc,chd->tbhd", x, self.wv)
        s = torch.einsum("jbhd,ibhd->jibh", k, q)
        T = x.size(0)
        # key j may be seen by query i only if j <= i: forbid the strict lower triangle
        future = torch.ones(T, T, dtype=torch.bool, device=x.device).tril(-1)
        s = s.masked_fill(future[:, :, None, None], float("-inf"))
        a = self.drop(s.softmax(dim=0))
        y = torch.einsum("jibh,jbhd->ibhd", a, v)
        return torch.einsum("ibhd,hdc->ibc", y, self.wo)
