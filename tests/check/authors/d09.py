import torch
import torch.nn as nn


class TimeFirstSelfAttention(nn.Module):
    """One head over [T, B, D] states of an LSTM.

    There is no value projection and no output projection: the result is a
    mixture of the LSTM states themselves, which the tagger above relies on.
    """

    def __init__(self, dim, key_dim=None):
        super().__init__()
        key_dim = key_dim or dim
        self.q = nn.Linear(dim, key_dim, bias=False)
        self.k = nn.Linear(dim, key_dim, bias=False)
        # half of the scale on each side keeps fp16 products small
        self.half_scale = key_dim ** -0.25

    def additive_mask(self, lengths, steps, dtype):
        idx = torch.arange(steps, device=lengths.device)
        out = torch.zeros(lengths.numel(), steps, dtype=dtype, device=lengths.device)
        return out.masked_fill_(idx >= lengths.unsqueeze(1), torch.finfo(dtype).min)

    def forward(self, states, lengths=None, not_self=False):
        steps = states.size(0)
        q = self.q(states) * self.half_scale
        k = self.k(states) * self.half_scale
        energy = torch.einsum("tbd,sbd->tbs", q, k)

        if lengths is not None:
            energy = energy + self.additive_mask(lengths, steps, energy.dtype)
        if not_self:
            # a position is described by its neighbours only
            # (a state that is alone in its sequence keeps itself)
            eye = torch.eye(steps, dtype=torch.bool, device=states.device).unsqueeze(1)
            if lengths is not None:
                eye = eye & (lengths > 1).view(1, -1, 1)
            elif steps == 1:
                eye = ~eye
            energy = energy.masked_fill(eye, torch.finfo(energy.dtype).min)

        alpha = torch.softmax(energy, dim=2)
        mixed = torch.einsum("tbs,sbd->tbd", alpha, states)
        return mixed, alpha


if __name__ == "__main__":
    layer = TimeFirstSelfAttention(32, 16)
    h = torch.randn(10, 3, 32)
    m, a = layer(h, torch.tensor([10, 7, 4]), not_self=True)
    print(m.shape, a.shape)
