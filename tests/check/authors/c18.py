import torch
from torch import nn


class SensorChannelAttention(nn.Module):
    """Attention between the channels of a multivariate signal.

    Every channel is one token; its feature is a learnt summary of its course
    in time. Each channel then takes a weighted mean of the courses of all
    channels, so that a broken sensor may borrow from the ones that agree
    with it.

    x: (batch, channels, time)
    """

    def __init__(self, n_time, d=32, temperature=None):
        super().__init__()
        self.enc = nn.Sequential(nn.Linear(n_time, 2 * d), nn.GELU(), nn.Linear(2 * d, d), nn.LayerNorm(d))
        self.to_q = nn.Linear(d, d, bias=False)
        self.to_k = nn.Linear(d, d, bias=False)
        self.to_v = nn.Linear(n_time, n_time)
        self.temperature = temperature or d ** 0.5
        self.alpha = nn.Parameter(torch.tensor(0.5))

    def mixing(self, x):
        s = self.enc(x)
        q, k = self.to_q(s), self.to_k(s)
        energy = torch.bmm(q, k.transpose(1, 2)) / self.temperature
        return torch.softmax(energy, dim=1)

    def forward(self, x, return_weights=False):
        mean = x.mean(dim=-1, keepdim=True)
        std = x.std(dim=-1, keepdim=True, unbiased=False) + 1e-5
        z = (x - mean) / std

        w = self.mixing(z)
        y = torch.bmm(w, self.to_v(z))
        y = z + self.alpha * y

        y = y * std + mean
        return (y, w) if return_weights else y


if __name__ == "__main__":
    net = SensorChannelAttention(n_time=64)
    sig = torch.randn(4, 9, 64)
    out, w = net(sig, return_weights=True)
    print(out.shape, w.shape)
