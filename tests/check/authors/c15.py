import torch
from torch import nn


def local_band(n_frames, left, right, device=None):
    """True where frame i must not see frame j: more than `left` frames back
    or more than `right` frames ahead."""
    t = torch.arange(n_frames, device=device)
    back = t[:, None] - t[None, :]
    return (back > left) & (back < -right)


class LocalFrameAttention(nn.Module):
    """Self-attention on spectrogram frames, [batch, frames, features], where
    each frame sees a neighbourhood of `left` past and `right` future frames."""

    def __init__(self, feat, heads=4, left=16, right=4, p=0.1):
        super().__init__()
        self.heads = heads
        self.left = left
        self.right = right
        self.norm = nn.LayerNorm(feat)
        self.q = nn.Linear(feat, feat)
        self.k = nn.Linear(feat, feat, bias=False)
        self.v = nn.Linear(feat, feat)
        self.o = nn.Linear(feat, feat)
        self.dropout = nn.Dropout(p)

    def forward(self, x, lengths=None):
        b, t, f = x.shape
        d = f // self.heads
        h = self.norm(x)
        q = self.q(h).reshape(b, t, self.heads, d).permute(0, 2, 1, 3).reshape(-1, t, d)
        k = self.k(h).reshape(b, t, self.heads, d).permute(0, 2, 3, 1).reshape(-1, d, t)
        v = self.v(h).reshape(b, t, self.heads, d).permute(0, 2, 1, 3).reshape(-1, t, d)

        s = torch.bmm(q, k).mul_(d ** -0.5).view(b, self.heads, t, t)
        s = s.masked_fill(local_band(t, self.left, self.right, x.device), -1e4)
        if lengths is not None:
            pad = torch.arange(t, device=x.device)[None] >= lengths[:, None]
            s = s.masked_fill(pad[:, None, None, :], -1e9)
        w = self.dropout(s.softmax(-1)).view(-1, t, t)
        y = torch.bmm(w, v).view(b, self.heads, t, d).permute(0, 2, 1, 3).reshape(b, t, f)
        return x + self.dropout(self.o(y))


if __name__ == "__main__":
    net = LocalFrameAttention(80)
    print(net(torch.randn(3, 120, 80), torch.tensor([120, 90, 75])).shape)
