from typing import NamedTuple

import torch
from torch import Tensor, nn


class InterestOutput(NamedTuple):
    interest: Tensor
    weights: Tensor


class IntensityAttention(nn.Module):
    """Target attention whose weights are NOT normalised over the history.

    A user with forty clicks on running shoes should come out stronger than a
    user with one; a softmax would give both the same total. So each clicked
    item gets its own sigmoid weight and the pooled vector is a sum: its length
    carries the intensity. A user with no history gets the zero vector. There
    is no softmax anywhere, hence the mask multiplies the weights (with a
    sigmoid this is exact, nothing else depends on the masked entries).
    """

    def __init__(self, dim: int, heads: int = 2):
        super().__init__()
        self.heads = heads
        self.target = nn.Linear(dim, dim)
        self.item = nn.Linear(dim, dim, bias=False)
        self.value = nn.Linear(dim, dim, bias=False)
        self.recency = nn.Parameter(torch.full((heads,), 0.1))
        self.offset = nn.Parameter(torch.full((heads,), -1.0))

    def forward(self, target: Tensor, history: Tensor, mask: Tensor, age: Tensor) -> InterestOutput:
        """target [B, D]; history [B, T, D]; mask [B, T] True = clicked;
        age [B, T] days since the click, any number where mask is False."""
        B, T, D = history.shape
        d = D // self.heads
        q = self.target(target).view(B, self.heads, d)
        k = self.item(history).view(B, T, self.heads, d)
        v = self.value(history).view(B, T, self.heads, d)

        logit = torch.einsum("bhd,bthd->bht", q, k) * d ** -0.5
        decay = nn.functional.softplus(self.recency)[None, :, None] * torch.log1p(age.clamp(min=0))[:, None, :]
        logit = logit - decay + self.offset[None, :, None]

        w = torch.sigmoid(logit) * mask[:, None, :].to(logit.dtype)
        pooled = torch.einsum("bht,bthd->bhd", w, v).reshape(B, D)
        return InterestOutput(pooled, w)


if __name__ == "__main__":
    att = IntensityAttention(32)
    out = att(torch.randn(4, 32), torch.randn(4, 15, 32), torch.rand(4, 15) > 0.4, torch.rand(4, 15) * 90)
    print(out.interest.shape, out.weights.shape)
