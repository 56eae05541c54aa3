import torch
from torch import nn


def group_norm(ch):
    return nn.GroupNorm(num_groups=min(32, ch // 4), num_channels=ch, eps=1e-6, affine=True)


class AttnBlock(nn.Module):
    """Single-head self-attention over the positions of a latent map."""

    def __init__(self, in_channels):
        super().__init__()
        self.in_channels = in_channels
        self.norm = group_norm(in_channels)
        self.q = nn.Conv2d(in_channels, in_channels, 1)
        self.k = nn.Conv2d(in_channels, in_channels, 1)
        self.v = nn.Conv2d(in_channels, in_channels, 1)
        self.proj_out = nn.Conv2d(in_channels, in_channels, 1)

    def forward(self, x):
        b, c, h, w = x.shape
        y = self.norm(x)
        q = self.q(y).reshape(b, c, h * w)
        k = self.k(y).reshape(b, c, h * w)
        v = self.v(y).reshape(b, c, h * w)

        # scores, b x queries x keys
        s = torch.bmm(q.permute(0, 2, 1), k)
        s = s * c ** -0.5
        s = torch.softmax(s, dim=2)

        # read the values, b x c x queries
        o = torch.bmm(v, s).reshape(b, c, h, w)
        return x + self.proj_out(o)


class MidBlock(nn.Module):
    def __init__(self, ch):
        super().__init__()
        self.conv1 = nn.Sequential(group_norm(ch), nn.SiLU(), nn.Conv2d(ch, ch, 3, padding=1))
        self.attn = AttnBlock(ch)
        self.conv2 = nn.Sequential(group_norm(ch), nn.SiLU(), nn.Conv2d(ch, ch, 3, padding=1))

    def forward(self, x):
        x = x + self.conv1(x)
        x = self.attn(x)
        return x + self.conv2(x)


if __name__ == "__main__":
    blk = MidBlock(64)
    print(blk(torch.randn(2, 64, 16, 16)).shape)
