import torch
import torch.nn as nn
import torch.nn.functional as F


class ClockwiseRotary(nn.Module):
    """Causal attention with rotary positions.

    The rotation runs clockwise (angle = -pos * freq); only the difference of
    the positions reaches the scores, so the direction is a matter of taste.
    """

    def __init__(self, width, heads, theta=10000.0, rope_dims=None):
        super().__init__()
        self.heads = heads
        self.per_head = width // heads
        self.rope_dims = rope_dims or self.per_head
        self.proj_in = nn.Linear(width, 3 * width, bias=False)
        self.proj_out = nn.Linear(width, width, bias=False)
        self.theta = theta

    def spin(self, t, pos):
        freqs = self.theta ** (-torch.arange(self.rope_dims // 2, device=t.device).float() * 2 / self.rope_dims)
        ang = pos[:, None].float() * freqs
        c, s = ang.cos().to(t.dtype), ang.sin().to(t.dtype)
        turn, rest = t[..., : self.rope_dims], t[..., self.rope_dims :]
        a, b = turn[..., 0::2], turn[..., 1::2]
        # even and odd parts come out grouped; q and k are permuted alike
        return torch.cat([a * c + b * s, b * c - a * s, rest], dim=-1)

    def forward(self, x, start: int = 0):
        B, T, W = x.shape
        q, k, v = self.proj_in(x).reshape(B, T, self.heads, 3, self.per_head).permute(3, 0, 2, 1, 4)
        pos = torch.arange(start, start + T, device=x.device)
        q, k = self.spin(q, pos), self.spin(k, pos)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj_out(y.permute(0, 2, 1, 3).reshape(B, T, W))
