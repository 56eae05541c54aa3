import math

import torch
import torch.nn as nn

LOG2_E = 1.0 / math.log(2.0)


class DistanceEncoderAttention(nn.Module):
    """Bidirectional attention for [T, B, D] with learned distance penalties.

    key_padding_mask follows torch: [B, T], True = ignore.
    """

    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.dh = dim // heads
        self.inp = nn.Linear(dim, 3 * dim)
        self.outp = nn.Linear(dim, dim)
        # softplus of this is the penalty per step to the left and to the right
        start = torch.linspace(-6.0, 0.0, heads)
        self.left = nn.Parameter(start.clone())
        self.right = nn.Parameter(start.flip(0).clone())

    def penalty(self, T):
        i = torch.arange(T, device=self.left.device, dtype=self.left.dtype)
        d = i[None, :] - i[:, None]
        left = nn.functional.softplus(self.left)[:, None, None] * (-d).clamp(min=0)
        right = nn.functional.softplus(self.right)[:, None, None] * d.clamp(min=0)
        return left + right

    def forward(self, x, key_padding_mask=None):
        T, B, D = x.shape
        q, k, v = self.inp(x).view(T, B * 3 * self.heads, self.dh).transpose(0, 1).view(
            B, 3, self.heads, T, self.dh).unbind(1)
        q = q.reshape(B * self.heads, T, self.dh)
        k = k.reshape(B * self.heads, T, self.dh)
        v = v.reshape(B * self.heads, T, self.dh)

        # everything in base two, exp2 is what the hardware has
        s = torch.bmm(q, k.transpose(1, 2)) * (LOG2_E / math.sqrt(self.dh))
        s = s - LOG2_E * self.penalty(T).repeat(B, 1, 1)
        if key_padding_mask is not None:
            gone = key_padding_mask.repeat_interleave(self.heads, dim=0)
            s = s.masked_fill(gone[:, None, :], -1e30)
        e = torch.exp2(s - s.amax(dim=2, keepdim=True).detach())
        # divide after the product, it is the smaller tensor
        y = torch.bmm(e, v) / e.sum(dim=2, keepdim=True)

        y = y.view(B, self.heads, T, self.dh).permute(2, 0, 1, 3).reshape(T, B, D)
        return self.outp(y)


if __name__ == "__main__":
    net = DistanceEncoderAttention(48, 6)
    pad = torch.arange(14)[None] >= torch.tensor([[14], [9], [3]])
    print(net(torch.randn(14, 3, 48), pad).shape)
