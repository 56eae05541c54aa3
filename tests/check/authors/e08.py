import torch
import torch.nn.functional as F
from einops import rearrange
from torch import nn


class CausalAttention(nn.Module):
    """Causal self attention; supports chunked prefill and decoding through `kv`.

    forward(x, kv=None) -> (y, kv). Feed the prompt in chunks of any size, each
    time with the kv which the call before gave back.
    """

    def __init__(self, dim, heads=8, dim_head=64, dropout=0.):
        super().__init__()
        inner = heads * dim_head
        self.heads = heads
        self.dropout = dropout
        self.norm = nn.LayerNorm(dim)
        self.to_qkv = nn.Linear(dim, inner * 3, bias=False)
        self.to_out = nn.Linear(inner, dim, bias=False)

    def forward(self, x, kv=None):
        x = self.norm(x)
        q, k, v = rearrange(self.to_qkv(x), 'b n (three h d) -> three b h n d', three=3, h=self.heads)

        if kv is not None:
            pk, pv = kv
            k = torch.cat((pk, k), dim=-2)
            v = torch.cat((pv, v), dim=-2)

        out = F.scaled_dot_product_attention(
            q, k, v,
            dropout_p=self.dropout if self.training else 0.,
            is_causal=q.shape[-2] > 1,   # a single token sees everything
        )
        out = rearrange(out, 'b h n d -> b n (h d)')
        return self.to_out(out), (k, v)
