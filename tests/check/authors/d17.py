"""Relative multi-head attention with segment memory, time-first layout."""
import torch
import torch.nn as nn


class SinusoidTable(nn.Module):
    def __init__(self, dim):
        super().__init__()
        inv = 1.0 / (10000 ** (torch.arange(0.0, dim, 2.0) / dim))
        self.register_buffer("inv_freq", inv)

    def forward(self, distances):
        ang = torch.outer(distances, self.inv_freq)
        return torch.cat([ang.sin(), ang.cos()], dim=-1)


def rel_shift(x):
    """Moves row i of x [Q, K, B, H] to the left by Q - 1 - i columns."""
    q, k, b, h = x.shape
    zero = x.new_zeros(q, 1, b, h)
    x = torch.cat([zero, x], dim=1).view(k + 1, q, b, h)
    return x[1:].view(q, k, b, h)


class RelAttention(nn.Module):
    """score(i, j) = (q_i + u) k_j + (q_i + w) r_{i-j}"""

    def __init__(self, d_model, n_head, dropout=0.1):
        super().__init__()
        self.n_head, self.d_head = n_head, d_model // n_head
        self.scale = self.d_head ** -0.5
        self.table = SinusoidTable(d_model)
        self.q_net = nn.Linear(d_model, d_model, bias=False)
        self.kv_net = nn.Linear(d_model, 2 * d_model, bias=False)
        self.r_net = nn.Linear(d_model, d_model, bias=False)
        self.o_net = nn.Linear(d_model, d_model, bias=False)
        self.u = nn.Parameter(torch.zeros(n_head, self.d_head))
        self.w = nn.Parameter(torch.zeros(n_head, self.d_head))
        self.norm = nn.LayerNorm(d_model)
        self.drop = nn.Dropout(dropout)

    def forward(self, x, mem=None):
        """x [Q, B, D]; mem [M, B, D] from the previous segment, no gradient."""
        qlen, bsz, _ = x.shape
        full = x if mem is None else torch.cat([mem.detach(), x], dim=0)
        klen = full.size(0)

        q = self.q_net(x).view(qlen, bsz, self.n_head, self.d_head)
        k, v = self.kv_net(full).chunk(2, dim=-1)
        k = k.reshape(klen, bsz, self.n_head, self.d_head)
        v = v.reshape(klen, bsz, self.n_head, self.d_head)
        steps = torch.arange(klen, device=x.device, dtype=x.dtype)
        r = self.r_net(self.table(steps)).view(klen, self.n_head, self.d_head)

        content = torch.einsum("ibnd,jbnd->ijbn", q + self.u, k)
        place = rel_shift(torch.einsum("ibnd,jnd->ijbn", q + self.w, r))
        score = (content + place) * self.scale

        hidden = torch.ones(qlen, klen, dtype=torch.bool, device=x.device)
        hidden = hidden.triu(1 + klen - qlen)
        score = score.masked_fill(hidden[:, :, None, None], float("-inf"))
        prob = self.drop(score.softmax(dim=1))

        vec = torch.einsum("ijbn,jbnd->ibnd", prob, v).reshape(qlen, bsz, -1)
        return self.norm(x + self.o_net(vec))


if __name__ == "__main__":
    att = RelAttention(64, 4)
    seg1, seg2 = torch.randn(12, 2, 64), torch.randn(12, 2, 64)
    att(seg1)
    print(att(seg2, mem=seg1).shape)
