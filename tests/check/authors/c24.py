import torch
import torch.nn as nn
import torch.nn.functional as F


class AttentionPool(nn.Module):
    """Pools a set of vectors into `k` vectors with learnt seed queries.

    Args:
        dim: width of the elements
        k: number of outputs
        heads: attention heads

    forward(x, exists): x [B, N, dim], exists [B, N] bool (True = element);
    every set holds at least one element. Returns [B, k, dim].
    """

    def __init__(self, dim, k=1, heads=4):
        super().__init__()
        self.k, self.heads = k, heads
        self.seeds = nn.init.trunc_normal_(torch.empty(1, k, dim), std=0.02)
        self.norm = nn.LayerNorm(dim)
        self.wq = nn.Linear(dim, dim)
        self.wkv = nn.Linear(dim, dim * 2)
        self.wo = nn.Linear(dim, dim)
        self.ff = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def _split(self, t):
        return t.unflatten(2, (self.heads, -1)).transpose(1, 2)

    def forward(self, x, exists=None):
        s = self.seeds.expand(x.size(0), -1, -1)
        x = self.norm(x)
        q = self._split(self.wq(s))
        k, v = map(self._split, self.wkv(x).chunk(2, dim=-1))

        mask = exists[:, None, None, :] if exists is not None else None
        o = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        o = s + self.wo(o.transpose(1, 2).flatten(2))
        return o + self.ff(o)


class SetClassifier(nn.Module):
    def __init__(self, in_dim, n_classes, dim=64):
        super().__init__()
        self.embed = nn.Sequential(nn.Linear(in_dim, dim), nn.ReLU(), nn.Linear(dim, dim))
        self.pool = AttentionPool(dim, k=4)
        self.cls = nn.Linear(4 * dim, n_classes)

    def forward(self, x, exists=None):
        return self.cls(self.pool(self.embed(x), exists).flatten(1))


if __name__ == "__main__":
    net = SetClassifier(6, 10)
    ex = torch.rand(3, 25) > 0.5
    ex[:, 0] = True
    print(net(torch.randn(3, 25, 6), ex).shape)
