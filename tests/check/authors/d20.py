import torch
import torch.nn as nn


class SoftcapAttention(nn.Module):
    """Causal (optionally windowed) attention with tanh-capped logits.

    :param dim: width of the stream
    :param heads: number of heads
    :param cap: logits are squashed into (-cap, cap); 0 switches this off
    :param window: how many tokens, itself included, a token can see; None = all
    """

    def __init__(self, dim, heads, cap=20.0, window=None):
        super().__init__()
        self.heads = heads
        self.cap = cap
        self.window = window
        self.scale = (dim // heads) ** -0.5
        self.q = nn.Linear(dim, dim, bias=False)
        self.kv = nn.Linear(dim, 2 * dim, bias=False)
        self.o = nn.Linear(dim, dim, bias=False)

    def visible(self, n, device):
        i = torch.arange(n, device=device)
        gap = i.view(-1, 1) - i.view(1, -1)
        ok = gap >= 0
        if self.window is not None:
            ok &= gap < self.window
        return ok

    def logits(self, q, k, valid=None):
        s = torch.einsum("bthd,bshd->bhts", q, k) * self.scale
        ok = self.visible(q.size(1), q.device)
        s = s.masked_fill(~ok, torch.finfo(s.dtype).min)
        if valid is not None:
            s = s.masked_fill(~valid[:, None, None, :], torch.finfo(s.dtype).min)
        if self.cap:
            s = self.cap * torch.tanh(s / self.cap)
        return s

    def forward(self, x, valid=None):
        """valid: [B, N] bool, False for padding at the end of a row."""
        b, n, c = x.shape
        q = self.q(x).view(b, n, self.heads, -1)
        k, v = self.kv(x).view(b, n, 2, self.heads, -1).unbind(2)
        p = self.logits(q, k, valid).softmax(-1)
        y = torch.einsum("bhts,bshd->bthd", p, v)
        return self.o(y.reshape(b, n, c))


if __name__ == "__main__":
    for w in (None, 4):
        m = SoftcapAttention(64, 4, window=w)
        v = torch.arange(16)[None] < torch.tensor([[16], [10]])
        print(m(torch.randn(2, 16, 64), v).shape)
