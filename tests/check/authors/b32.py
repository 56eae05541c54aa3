import torch
from torch import nn, einsum
from einops import rearrange


class TalkingHeadsAttention(nn.Module):
    """https://arxiv.org/abs/2003.02436"""

    def __init__(self, dim, heads=8, dim_head=64, dropout=0.):
        super().__init__()
        inner_dim = dim_head * heads
        self.heads = heads
        self.scale = dim_head ** -0.5

        self.to_q = nn.Linear(dim, inner_dim, bias=False)
        self.to_kv = nn.Linear(dim, inner_dim * 2, bias=False)

        self.mix_heads_pre_attn = nn.Parameter(torch.randn(heads, heads))
        self.mix_heads_post_attn = nn.Parameter(torch.randn(heads, heads))

        self.dropout = nn.Dropout(dropout)
        self.to_out = nn.Sequential(nn.Linear(inner_dim, dim), nn.Dropout(dropout))

    def forward(self, x, mask=None):
        # mask (b, n): True for real tokens
        h = self.heads
        qkv = (self.to_q(x), *self.to_kv(x).chunk(2, dim=-1))
        q, k, v = map(lambda t: rearrange(t, 'b n (h d) -> b h n d', h=h), qkv)

        dots = einsum('b h i d, b h j d -> b h i j', q, k) * self.scale
        if mask is not None:
            dots = dots.masked_fill(~rearrange(mask, 'b j -> b () () j'), -1e4)
        dots = einsum('b h i j, h g -> b g i j', dots, self.mix_heads_pre_attn)

        attn = dots.softmax(dim=-1)
        attn = self.dropout(attn)
        attn = einsum('b h i j, h g -> b g i j', attn, self.mix_heads_post_attn)

        out = einsum('b h i j, b h j d -> b h i d', attn, v)
        out = rearrange(out, 'b h n d -> b n (h d)')
        return self.to_out(out)
