import torch
from torch import nn, einsum
from einops import rearrange


class TalkingHeadsAttention(nn.Module):
    """https://arxiv.org/abs/2003.02436, autoregressive"""

    def __init__(self, dim, heads=8, dim_head=64, dropout=0.):
        super().__init__()
        inner_dim = dim_head * heads
        self.heads = heads
        self.scale = dim_head ** -0.5

        self.to_q = nn.Linear(dim, inner_dim, bias=False)
        self.to_kv = nn.Linear(dim, inner_dim * 2, bias=False)

        self.pre_softmax_talk = nn.Conv2d(heads, heads, 1, bias=False)
        self.post_softmax_talk = nn.Conv2d(heads, heads, 1, bias=False)

        self.dropout = nn.Dropout(dropout)
        self.to_out = nn.Linear(inner_dim, dim)

    def forward(self, x, mask=None):
        n, h = x.shape[1], self.heads
        q = self.to_q(x)
        k, v = self.to_kv(x).chunk(2, dim=-1)
        q, k, v = map(lambda t: rearrange(t, 'b n (h d) -> b h n d', h=h), (q, k, v))

        dots = einsum('b h i d, b h j d -> b h i j', q, k) * self.scale

        mask_value = -1e4
        if mask is not None:
            dots = dots.masked_fill(~rearrange(mask, 'b j -> b 1 1 j'), mask_value)
        causal = torch.ones(n, n, device=x.device).triu(1).bool()
        dots = dots.masked_fill(causal, mask_value)

        dots = self.pre_softmax_talk(dots)
        attn = dots.softmax(dim=-1)
        attn = self.post_softmax_talk(attn)
        attn = self.dropout(attn)

        out = einsum('b h i j, b h j d -> b h i d', attn, v)
        return self.to_out(rearrange(out, 'b h n d -> b n (h d)'))
