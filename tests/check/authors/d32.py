import torch
from torch import nn, einsum


def partial_attention(q, k, v, mask=None):
    """Returns the attention output and the log of its denominator."""
    s = einsum("b h i d, b h j d -> b h i j", q, k)
    if mask is not None:
        s = s.masked_fill(~mask, -torch.inf)
    lse = s.logsumexp(dim=-1, keepdim=True)
    return einsum("b h i j, b h j d -> b h i d", (s - lse).exp(), v), lse


def combine(parts):
    """Joins outputs over disjoint key sets into the output over their union."""
    outs, lses = zip(*parts)
    share = torch.cat(lses, dim=-1).softmax(dim=-1)
    return sum(share[..., n : n + 1] * o for n, o in enumerate(outs))


class LocalGlobalAttention(nn.Module):
    """Block-local causal attention plus learned global slots.

    The sequence is cut into blocks of w. A token sees its own block up to
    itself, the whole block before, and all the global slots; the three are one
    softmax, evaluated in parts.
    """

    def __init__(self, dim, heads=4, w=16, n_global=4):
        super().__init__()
        self.heads, self.w = heads, w
        self.to_qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.slots = nn.Parameter(torch.randn(2, heads, n_global, dim // heads))
        self.to_out = nn.Linear(dim, dim)

    def forward(self, x):
        b, n, c = x.shape
        w, h = self.w, self.heads
        fill = -n % w
        x = nn.functional.pad(x, (0, 0, 0, fill))
        blocks = x.shape[1] // w
        q, k, v = self.to_qkv(x).chunk(3, dim=-1)
        # blocks go into the batch axis: (b blocks) h w d
        q, k, v = (
            t.reshape(b * blocks, w, h, c // h).transpose(1, 2) for t in (q, k, v)
        )
        q = q * (c // h) ** -0.5

        tri = torch.ones(w, w, dtype=torch.bool, device=x.device).tril()
        own = partial_attention(q, k, v, tri)

        mk, mv = (t.expand(b * blocks, -1, -1, -1) for t in self.slots)
        glob = partial_attention(q, mk, mv)

        def before(t):
            return t.unflatten(0, (b, blocks)).roll(1, dims=1).flatten(0, 1)

        out, lse = partial_attention(q, before(k), before(v))
        first = torch.arange(b * blocks, device=x.device) % blocks == 0
        prev = out, lse.masked_fill(first[:, None, None, None], -torch.inf)

        y = combine([own, prev, glob])
        y = y.transpose(1, 2).reshape(b, blocks * w, c)
        return self.to_out(y[:, :n])


if __name__ == "__main__":
    print(LocalGlobalAttention(64)(torch.randn(2, 50, 64)).shape)
