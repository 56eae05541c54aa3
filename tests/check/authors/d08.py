"""Memory-lean causal attention: one pass over key blocks with a running max."""
import torch
from torch import nn


def blockwise_attention(q, k, v, block=64, causal=True):
    """q, k, v: (..., N, D). Never builds the N x N score matrix."""
    n, d = q.shape[-2:]
    scale = d ** -0.5
    rows = torch.arange(n, device=q.device)

    run_max = q.new_full((*q.shape[:-1], 1), float("-inf"))
    denom = q.new_zeros((*q.shape[:-1], 1))
    acc = torch.zeros_like(q)

    for lo in range(0, k.shape[-2], block):
        hi = min(lo + block, k.shape[-2])
        kb, vb = k[..., lo:hi, :], v[..., lo:hi, :]
        s = q @ kb.transpose(-1, -2) * scale
        if causal:
            cols = torch.arange(lo, hi, device=q.device)
            s = s.masked_fill(cols[None, :] > rows[:, None], float("-inf"))

        new_max = torch.maximum(run_max, s.amax(dim=-1, keepdim=True))
        p = torch.exp(s - new_max)
        fix = torch.exp(run_max - new_max)
        denom = denom * fix + p.sum(dim=-1, keepdim=True)
        acc = acc + p @ vb
        run_max = new_max

    return acc / denom


class LeanSelfAttention(nn.Module):
    def __init__(self, dim, heads, block=64):
        super().__init__()
        self.heads, self.block = heads, block
        self.ln = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, dim * 3)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x):
        b, n, c = x.shape
        qkv = self.qkv(self.ln(x)).reshape(b, n, 3, self.heads, c // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        y = blockwise_attention(q, k, v, block=self.block)
        return x + self.proj(y.transpose(1, 2).reshape(b, n, c))


if __name__ == "__main__":
    m = LeanSelfAttention(128, 4, block=32)
    print(m(torch.randn(2, 100, 128)).shape)
