import torch
import torch.nn as nn
import torch.nn.functional as F
from einops import rearrange


def elu_feature_map(x):
    return F.elu(x) + 1


class LinearAttention(nn.Module):
    """
    Transformers are RNNs: O(N) attention with phi(x) = elu(x) + 1 (non causal).
    """

    def __init__(self, dim, heads=8, dim_head=32, eps=1e-6, dropout=0.):
        super().__init__()
        self.heads = heads
        self.eps = eps
        inner = heads * dim_head
        self.to_qkv = nn.Linear(dim, inner * 3, bias=False)
        self.to_out = nn.Sequential(nn.Linear(inner, dim), nn.Dropout(dropout))

    def forward(self, x, mask=None):
        """
        x    : b n d
        mask : b n, True = real token
        """
        q, k, v = self.to_qkv(x).chunk(3, dim=-1)
        q, k, v = (rearrange(t, 'b n (h d) -> b h n d', h=self.heads) for t in (q, k, v))

        if mask is not None:
            k = k.masked_fill(~mask[:, None, :, None], 0.)

        q = elu_feature_map(q)
        k = elu_feature_map(k)

        kv = torch.einsum('bhnd,bhne->bhde', k, v)
        z = 1 / (torch.einsum('bhnd,bhd->bhn', q, k.sum(dim=2)) + self.eps)
        out = torch.einsum('bhnd,bhde,bhn->bhne', q, kv, z)

        out = rearrange(out, 'b h n d -> b n (h d)')
        return self.to_out(out)


if __name__ == '__main__':
    m = LinearAttention(128)
    x = torch.randn(2, 1000, 128)
    lens = torch.tensor([1000, 640])
    mask = torch.arange(1000)[None] < lens[:, None]
    print(m(x, mask).shape)
