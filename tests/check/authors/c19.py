import torch
import torch.nn as nn
import torch.nn.functional as F


def moving_average(x, k):
    """Mean of the last k steps, the first step repeated in front; x is [B, L, D]."""
    x = torch.cat([x[:, :1].expand(-1, k - 1, -1), x], dim=1)
    return F.avg_pool1d(x.transpose(1, 2), k, stride=1).transpose(1, 2)


class Rms(nn.Module):
    def __init__(self, d, eps=1e-6):
        super().__init__()
        self.g = nn.Parameter(torch.ones(d))
        self.eps = eps

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.g


class DecompAttention(nn.Module):
    """Splits the state into trend and season; season goes through attention,
    trend through a linear map, and the two are put together again.

    About the scale: queries and keys are RMS-normalised, then divided by
    d ** 0.25 each inside `unit`, i.e. q.k is already divided by sqrt(d). So
    SDPA is called with scale=1.0; the usual factor would count twice.

    Causal throughout: the mean is a trailing one and the attention lets a step
    see itself and the past.
    """

    def __init__(self, d_model, heads=4, kernel=25):
        super().__init__()
        self.heads, self.kernel = heads, kernel
        hd = d_model // heads
        self.in_proj = nn.Linear(d_model, 3 * d_model, bias=False)
        self.q_rms, self.k_rms = Rms(hd), Rms(hd)
        self.trend = nn.Linear(d_model, d_model)
        self.out = nn.Linear(d_model, d_model)
        nn.init.eye_(self.trend.weight)
        nn.init.zeros_(self.trend.bias)

    def unit(self, t, rms):
        return rms(t) * t.shape[-1] ** -0.25

    def forward(self, x):
        b, l, d = x.shape
        slow = moving_average(x, self.kernel)
        fast = x - slow
        q, k, v = self.in_proj(fast).view(b, l, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        q, k = self.unit(q, self.q_rms), self.unit(k, self.k_rms)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=1.0)
        fast = fast + self.out(y.transpose(1, 2).reshape(b, l, d))
        return fast + self.trend(slow)


if __name__ == "__main__":
    print(DecompAttention(32)(torch.randn(2, 96, 32)).shape)
