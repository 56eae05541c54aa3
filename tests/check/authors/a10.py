import torch
from torch import nn
import torch.nn.functional as F
from einops import rearrange


class PrimerAttention(nn.Module):
    """Multi-DConv-head attention (Primer, So et al. 2021), decoder variant.
    A width-3 depthwise conv runs over time on each of q, k and v after the projection.
    """

    def __init__(self, dim, heads=8, dim_head=64, kernel_size=3):
        super().__init__()
        inner = heads * dim_head
        self.heads = heads
        self.scale = dim_head ** -0.5
        self.to_qkv = nn.Linear(dim, inner * 3, bias=False)
        self.dconv = nn.Conv1d(inner * 3, inner * 3, kernel_size, padding=kernel_size // 2, groups=inner * 3)
        self.to_out = nn.Linear(inner, dim, bias=False)

    def forward(self, x):
        n, device = x.shape[1], x.device
        qkv = rearrange(self.to_qkv(x), "b n d -> b d n")
        qkv = self.dconv(qkv)
        q, k, v = rearrange(qkv, "b (qkv h d) n -> qkv b h n d", qkv=3, h=self.heads)

        sim = torch.einsum("b h i d, b h j d -> b h i j", q, k) * self.scale
        causal_mask = torch.ones((n, n), dtype=torch.bool, device=device).triu(1)
        sim = sim.masked_fill(causal_mask, -torch.finfo(sim.dtype).max)
        attn = sim.softmax(dim=-1)
        out = torch.einsum("b h i j, b h j d -> b h i d", attn, v)
        return self.to_out(rearrange(out, "b h n d -> b n (h d)"))
