import torch
import torch.nn as nn
from einops import rearrange
from einops.layers.torch import Rearrange


class ConvProjAttention(nn.Module):
    """CvT style attention: depthwise conv projections, class token bypasses the convs.

    forward(x, h, w): x is (B, 1 + h*w, dim), patches in row-major order of an h x w grid.
    """

    def __init__(self, dim, num_heads, kernel_size=3, stride_kv=2, with_cls=True, drop=0.0):
        super().__init__()
        self.heads = num_heads
        self.scale = (dim // num_heads) ** -0.5
        self.with_cls = with_cls
        self.conv_q = self._dw(dim, kernel_size, 1)
        self.conv_k = self._dw(dim, kernel_size, stride_kv)
        self.conv_v = self._dw(dim, kernel_size, stride_kv)
        self.lin_q = nn.Linear(dim, dim)
        self.lin_k = nn.Linear(dim, dim)
        self.lin_v = nn.Linear(dim, dim)
        self.proj = nn.Linear(dim, dim)
        self.drop = nn.Dropout(drop)

    @staticmethod
    def _dw(dim, k, s):
        return nn.Sequential(
            nn.Conv2d(dim, dim, k, stride=s, padding=k // 2, groups=dim, bias=False),
            nn.BatchNorm2d(dim),
            Rearrange('b c h w -> b (h w) c'),
        )

    def forward(self, x, h, w):
        if self.with_cls:
            cls, x = torch.split(x, [1, h * w], dim=1)
        grid = rearrange(x, 'b (w h) c -> b c h w', h=h, w=w)
        q, k, v = self.conv_q(grid), self.conv_k(grid), self.conv_v(grid)
        if self.with_cls:
            q, k, v = (torch.cat((cls, t), dim=1) for t in (q, k, v))

        q = rearrange(self.lin_q(q), 'b n (h d) -> b h n d', h=self.heads)
        k = rearrange(self.lin_k(k), 'b n (h d) -> b h n d', h=self.heads)
        v = rearrange(self.lin_v(v), 'b n (h d) -> b h n d', h=self.heads)

        attn = torch.einsum('bhld,bhtd->bhlt', q, k) * self.scale
        attn = self.drop(attn.softmax(-1))
        out = torch.einsum('bhlt,bhtd->bhld', attn, v)
        return self.proj(rearrange(out, 'b h n d -> b n (h d)'))
