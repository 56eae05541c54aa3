import torch
from torch import nn, Tensor


class AxisAttention(nn.Module):
    """Self-attention along an arbitrary axis of a channels-last tensor."""

    def __init__(self, dim: int, n_head: int, axis: int, max_len: int = 64):
        super().__init__()
        self.axis, self.n_head = axis, n_head
        self.temperature = (dim // n_head) ** 0.5
        self.pos = nn.Parameter(torch.zeros(max_len, dim))
        self.qk = nn.Linear(dim, 2 * dim, bias=False)
        self.v = nn.Linear(dim, dim, bias=False)
        self.o = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        x = x.swapaxes(self.axis, -2)            # (..., L, C)
        L = x.shape[-2]
        # positions only steer the matching, not what is read out
        q, k = self.qk(x + self.pos[:L]).chunk(2, -1)
        v = self.v(x)

        q, k, v = (t.unflatten(-1, (self.n_head, -1)).movedim(-2, 0) for t in (q, k, v))  # (h, ..., L, d)
        w = torch.softmax(q @ k.mT / self.temperature, -1)
        y = (w @ v).movedim(0, -2).flatten(-2)
        return self.o(y).swapaxes(self.axis, -2)
