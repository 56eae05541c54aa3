import torch
from torch import nn, einsum


class AxialAttention(nn.Module):
    """Attention along one axis of a map.

    Input and output are (B, C, H, W). axis='h' mixes the pixels of a column, axis='w' those of a row.
    Learned relative embeddings for queries only, as in the small model of Axial-DeepLab.
    """

    def __init__(self, channels, heads=4, span=32, axis='h'):
        super().__init__()
        assert channels % heads == 0 and axis in ('h', 'w')
        self.heads, self.dh = heads, channels // heads
        self.axis, self.span = axis, span
        self.to_qkv = nn.Conv2d(channels, 3 * channels, 1, bias=False)
        self.to_out = nn.Conv2d(channels, channels, 1)
        self.rel = nn.Parameter(torch.randn(2 * span - 1, self.dh) * self.dh ** -0.5)

    def forward(self, x):
        b, c, h, w = x.shape
        qkv = self.to_qkv(x).view(b, 3, self.heads, self.dh, h, w)
        if self.axis == 'h':
            qkv = qkv.permute(1, 0, 5, 2, 4, 3)     # 3 b w heads h d
        else:
            qkv = qkv.permute(1, 0, 4, 2, 5, 3)     # 3 b h heads w d
        q, k, v = qkv
        n = q.shape[-2]
        assert n <= self.span, f'axis of {n} pixels, but span is {self.span}'

        pos = torch.arange(n, device=x.device)
        rel = self.rel[pos[None, :] - pos[:, None] + self.span - 1]     # i j d
        logits = einsum('bxhid,bxhjd->bxhij', q, k) + einsum('bxhid,ijd->bxhij', q, rel)
        attn = (logits * self.dh ** -0.5).softmax(dim=-1)
        y = einsum('bxhij,bxhjd->bxhid', attn, v)                       # b other heads n d

        if self.axis == 'h':
            y = y.permute(0, 2, 4, 3, 1)            # b heads d h w
        else:
            y = y.permute(0, 2, 4, 1, 3)
        return self.to_out(y.reshape(b, c, h, w))
