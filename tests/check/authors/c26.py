import torch
from torch import nn


class SlotPool(nn.Module):
    """Iterative slots over a set of features.

    Note on the axis: the softmax runs over the SLOTS (the queries), so that
    slots compete for each input, as slot attention asks. The weights are then
    divided by their sum over the inputs to turn each slot's update into a
    mean. Do not "repair" this to a softmax over the keys.

    inputs [B, N, d_in], keep [B, N] (True = real input, optional) -> [B, S, d]
    """

    def __init__(self, d_in, d=64, slots=6, iters=3, eps=1e-8):
        super().__init__()
        self.slots, self.iters, self.eps, self.d = slots, iters, eps, d
        self.mu = nn.Parameter(torch.randn(1, 1, d) * 0.1)
        self.log_sigma = nn.Parameter(torch.zeros(1, 1, d) - 1.0)
        self.norm_in = nn.LayerNorm(d_in)
        self.norm_slot = nn.LayerNorm(d)
        self.norm_mlp = nn.LayerNorm(d)
        self.k = nn.Linear(d_in, d, bias=False)
        self.v = nn.Linear(d_in, d, bias=False)
        self.q = nn.Linear(d, d, bias=False)
        self.gru = nn.GRUCell(d, d)
        self.mlp = nn.Sequential(nn.Linear(d, 2 * d), nn.ReLU(), nn.Linear(2 * d, d))

    def start(self, b, like, noise=None):
        if noise is None:
            noise = torch.randn(b, self.slots, self.d, device=like.device, dtype=like.dtype)
        return self.mu + self.log_sigma.exp() * noise

    def forward(self, inputs, keep=None, noise=None):
        b = inputs.shape[0]
        x = self.norm_in(inputs)
        k, v = self.k(x), self.v(x)
        slots = self.start(b, inputs, noise)

        for _ in range(self.iters):
            q = self.q(self.norm_slot(slots)) * self.d ** -0.5
            attn = torch.einsum("bsd,bnd->bsn", q, k).softmax(dim=1) + self.eps
            if keep is not None:
                # after the softmax is right here: inputs do not compete with each other
                attn = attn * keep[:, None, :]
            attn = attn / attn.sum(dim=2, keepdim=True).clamp_min(self.eps)
            update = torch.einsum("bsn,bnd->bsd", attn, v)
            slots = self.gru(update.flatten(0, 1), slots.flatten(0, 1)).view(b, self.slots, self.d)
            slots = slots + self.mlp(self.norm_mlp(slots))
        return slots


if __name__ == "__main__":
    torch.manual_seed(0)
    print(SlotPool(32)(torch.randn(2, 100, 32)).shape)
