import torch
import torch.nn as nn
from einops import rearrange


class LinearAttention2d(nn.Module):
    """Linear-cost attention for the high-resolution stages of a diffusion U-Net.

    The two softmaxes are on different axes, as the factorised form wants:
      * q over its channels, a distribution for each pixel
      * k over the pixels, a distribution for each channel
    Their product (never formed) is then a proper row-stochastic matrix of
    pixels by pixels, so no 1/N and no further normaliser is due; the order of
    the products is (k v^T) first, O(N d^2).

    Four memory cells (learnt key/value pairs) stand next to the pixels.
    """

    def __init__(self, dim, heads=4, dim_head=32, memory=4, groups=8):
        super().__init__()
        inner = heads * dim_head
        self.heads = heads
        self.norm = nn.GroupNorm(groups, dim)
        self.to_qkv = nn.Conv2d(dim, 3 * inner, 1, bias=False)
        self.mem_k = nn.Parameter(torch.randn(heads, dim_head, memory))
        self.mem_v = nn.Parameter(torch.randn(heads, dim_head, memory))
        self.to_out = nn.Sequential(nn.Conv2d(inner, dim, 1), nn.GroupNorm(1, dim))

    def forward(self, x):
        b, _, h, w = x.shape
        q, k, v = self.to_qkv(self.norm(x)).chunk(3, dim=1)
        q, k, v = (rearrange(t, "b (h d) x y -> b h d (x y)", h=self.heads) for t in (q, k, v))

        k = torch.cat([self.mem_k.expand(b, -1, -1, -1), k], dim=-1)
        v = torch.cat([self.mem_v.expand(b, -1, -1, -1), v], dim=-1)

        q = q.softmax(dim=-2)
        k = k.softmax(dim=-1)

        context = torch.einsum("b h d n, b h e n -> b h d e", k, v)
        out = torch.einsum("b h d e, b h d n -> b h e n", context, q)
        out = rearrange(out, "b h e (x y) -> b (h e) x y", x=h, y=w)
        return x + self.to_out(out)


if __name__ == "__main__":
    for hw in ((32, 32), (16, 24)):
        print(LinearAttention2d(64)(torch.randn(1, 64, *hw)).shape)
