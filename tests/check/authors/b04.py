import torch
from torch import nn
from einops import rearrange


def lengths_to_mask(lengths, max_len):
    """True for real frames."""
    return torch.arange(max_len, device=lengths.device)[None] < lengths[:, None]


class LengthMaskedAttention(nn.Module):
    def __init__(self, dim, heads=4, p=0.0):
        super().__init__()
        self.heads = heads
        self.scale = (dim // heads) ** -0.5
        self.to_qkv = nn.Linear(dim, dim * 3, bias=False)
        self.to_out = nn.Sequential(nn.Linear(dim, dim), nn.Dropout(p))
        self.attn_drop = nn.Dropout(p)

    def forward(self, x, lengths=None):
        q, k, v = self.to_qkv(x).chunk(3, dim=-1)
        # channels are interleaved over heads: (d h), both on the way in and on the way out
        q, k, v = (rearrange(t, 'b n (d h) -> b h n d', h=self.heads) for t in (q, k, v))

        sim = torch.einsum('b h i d, b h j d -> b h i j', q * self.scale, k)
        if lengths is not None:
            keep = lengths_to_mask(lengths, x.shape[1])
            sim = sim.masked_fill(~rearrange(keep, 'b j -> b 1 1 j'), -torch.finfo(sim.dtype).max)
        attn = self.attn_drop(sim.softmax(dim=-1))

        out = torch.einsum('b h i j, b h j d -> b h i d', attn, v)
        return self.to_out(rearrange(out, 'b h n d -> b n (d h)'))
