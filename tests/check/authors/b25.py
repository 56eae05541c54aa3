import torch
from torch import nn, einsum
from einops import rearrange, repeat


def exists(val):
    return val is not None


class PerceiverCrossAttend(nn.Module):
    """Reads an input array into a small set of learned latents."""

    def __init__(self, *, input_dim, num_latents=32, latent_dim=128, heads=4, dim_head=32, dropout=0.):
        super().__init__()
        inner = heads * dim_head
        self.heads = heads
        self.scale = dim_head ** -0.5

        self.latents = nn.Parameter(torch.randn(num_latents, latent_dim)) * 0.02
        self.norm_latents = nn.LayerNorm(latent_dim)
        self.norm_input = nn.LayerNorm(input_dim)

        self.to_q = nn.Linear(latent_dim, inner, bias=False)
        self.to_kv = nn.Linear(input_dim, inner * 2, bias=False)
        self.dropout = nn.Dropout(dropout)
        self.to_out = nn.Linear(inner, latent_dim)

    def forward(self, data, mask=None):
        # data: (b, n, input_dim), mask: (b, n) bool, True = use
        x = repeat(self.latents, 'n d -> b n d', b=data.shape[0])
        h = self.heads

        q = self.to_q(self.norm_latents(x))
        k, v = self.to_kv(self.norm_input(data)).chunk(2, dim=-1)
        q, k, v = map(lambda t: rearrange(t, 'b n (h d) -> (b h) n d', h=h), (q, k, v))

        sim = einsum('b i d, b j d -> b i j', q, k) * self.scale
        if exists(mask):
            max_neg_value = -torch.finfo(sim.dtype).max
            mask = repeat(mask, 'b j -> (b h) () j', h=h)
            sim = sim.masked_fill(~mask, max_neg_value)
        attn = self.dropout(sim.softmax(dim=-1))

        out = einsum('b i j, b j d -> b i d', attn, v)
        out = rearrange(out, '(b h) n d -> b n (h d)', h=h)
        return x + self.to_out(out)
