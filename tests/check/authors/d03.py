"""Causal attention whose softmax may sum to less than one."""
import torch
from einops import rearrange
from torch import nn


def quiet_softmax(x, dim=-1):
    """exp(x) / (1 + sum exp(x)).

    A head with nothing to say can push all its scores down and output zero,
    which it cannot do with an ordinary softmax.
    """
    m = x.detach().amax(dim=dim, keepdim=True).clamp(min=0)
    e = torch.exp(x - m)
    return e / (torch.exp(-m) + e.sum(dim=dim, keepdim=True))


class QuietAttention(nn.Module):
    def __init__(self, width, heads=8, p_drop=0.0):
        super().__init__()
        self.heads = heads
        self.inner = width // heads
        self.pre = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width)
        self.p_drop = nn.Dropout(p_drop)

    def forward(self, x, pad=None):
        """x [b n c]; pad [b n], True where the token is filler."""
        n = x.shape[1]
        q, k, v = rearrange(
            self.qkv(self.pre(x)), "b n (three h d) -> three b h n d", three=3, h=self.heads
        )
        sim = torch.einsum("bhid,bhjd->bhij", q, k) * self.inner ** -0.5

        hide = torch.ones(n, n, dtype=torch.bool, device=x.device).triu(1)
        hide = hide[None, None]
        if pad is not None:
            hide = hide | pad[:, None, None, :]
        # a row in which everything is hidden simply gives zeros here
        sim = sim.masked_fill(hide, float("-inf"))

        w = self.p_drop(quiet_softmax(sim))
        y = torch.einsum("bhij,bhjd->bhid", w, v)
        return x + self.out(rearrange(y, "b h n d -> b n (h d)"))


if __name__ == "__main__":
    net = QuietAttention(64, heads=4)
    pad = torch.zeros(2, 12, dtype=torch.bool)
    pad[1, :3] = True
    print(net(torch.randn(2, 12, 64), pad).shape)
