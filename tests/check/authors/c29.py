import torch
import torch.nn.functional as F
from torch import nn


class AnchorFrameAttention(nn.Module):
    """Spatial attention for clips, with keys from three frames only.

    Frame t reads the first frame (identity), frame t - 1 (motion), and itself.
    At t = 0 and t = 1 some of these are the same frame, and its tokens then
    appear more than once among the keys. We leave the copies in: all frames
    keep the same number of keys, and a copy only adds log(copies) to the
    score of the tokens of that frame, which is the emphasis we want on the
    anchor at the start of a clip.

    The output projection starts at zero, so a pretrained image model is not
    disturbed when this block is put in.

    clip: [B, T, N, C]
    """

    def __init__(self, channels, heads=8, zero_init=True):
        super().__init__()
        assert channels % heads == 0
        self.heads = heads
        self.norm = nn.LayerNorm(channels)
        self.to_q = nn.Linear(channels, channels, bias=False)
        self.to_k = nn.Linear(channels, channels, bias=False)
        self.to_v = nn.Linear(channels, channels, bias=False)
        self.to_out = nn.Linear(channels, channels)
        if zero_init:
            nn.init.zeros_(self.to_out.weight)
            nn.init.zeros_(self.to_out.bias)

    @staticmethod
    def three_frames(x):
        first = x[:, :1].expand_as(x)
        before = torch.cat([x[:, :1], x[:, :-1]], dim=1)
        return torch.cat([first, before, x], dim=2)          # B, T, 3N, C

    def split(self, x):
        b, t, n, c = x.shape
        return x.reshape(b * t, n, self.heads, c // self.heads).transpose(1, 2)

    def forward(self, clip):
        b, t, n, c = clip.shape
        y = self.norm(clip)
        q = self.split(self.to_q(y))
        k = self.split(self.three_frames(self.to_k(y)))
        v = self.split(self.three_frames(self.to_v(y)))
        o = F.scaled_dot_product_attention(q, k, v)
        o = o.transpose(1, 2).reshape(b, t, n, c)
        return clip + self.to_out(o)
