import torch
import torch.nn as nn


class ChunkedCausalAttention(nn.Module):
    """Memory saver: handles the queries in chunks, each against the keys it can see and no more."""

    def __init__(self, d_model, n_heads, chunk=16):
        super().__init__()
        self.n_heads, self.chunk = n_heads, chunk
        self.d_head = d_model // n_heads
        self.norm_q = nn.LayerNorm(self.d_head)
        self.norm_k = nn.LayerNorm(self.d_head)
        self.qkv = nn.Linear(d_model, 3 * d_model, bias=False)
        self.out = nn.Linear(d_model, d_model, bias=False)
        self.temperature = nn.Parameter(torch.full((n_heads, 1, 1), self.d_head ** -0.5))

    def forward(self, x):
        b, n, c = x.shape
        q, k, v = self.qkv(x).view(b, n, self.n_heads, 3 * self.d_head).transpose(1, 2).chunk(3, -1)
        q = self.norm_q(q) * self.temperature
        k = self.norm_k(k)
        pieces = []
        for lo in range(0, n, self.chunk):
            hi = min(lo + self.chunk, n)
            s = q[:, :, lo:hi] @ k[:, :, :hi].transpose(-1, -2)
            hidden = torch.ones(hi - lo, hi, dtype=torch.bool, device=x.device).triu(lo + 1)
            s = s.masked_fill(hidden, float("-inf"))
            s = s - s.amax(-1, keepdim=True).detach()
            e = s.exp()
            pieces.append(e @ v[:, :, :hi] / e.sum(-1, keepdim=True))
        y = torch.cat(pieces, dim=2)
        return self.out(y.transpose(1, 2).reshape(b, n, c))
