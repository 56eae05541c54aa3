from dataclasses import dataclass
from typing import Optional

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass
class GraphTransformerConfig:
    hidden: int = 64
    heads: int = 4
    max_hops: int = 8
    max_degree: int = 32
    dropout: float = 0.1


class HopBias(nn.Module):
    """Learnt score for each hop distance; the last bucket is 'far or not connected'."""

    def __init__(self, cfg: GraphTransformerConfig):
        super().__init__()
        self.cfg = cfg
        self.emb = nn.Embedding(cfg.max_hops + 1, cfg.heads)
        nn.init.normal_(self.emb.weight, std=0.02)

    def forward(self, hops: Tensor) -> Tensor:
        far = (hops < 0) | (hops > self.cfg.max_hops)
        hops = hops.masked_fill(far, self.cfg.max_hops)
        return self.emb(hops).permute(0, 3, 1, 2)


class GraphTransformerAttention(nn.Module):
    def __init__(self, cfg: GraphTransformerConfig):
        super().__init__()
        self.cfg = cfg
        self.degree = nn.Embedding(cfg.max_degree + 1, cfg.hidden)
        self.hop_bias = HopBias(cfg)
        self.norm = nn.LayerNorm(cfg.hidden)
        self.qkv = nn.Linear(cfg.hidden, 3 * cfg.hidden)
        self.out = nn.Linear(cfg.hidden, cfg.hidden)
        self.out_drop = nn.Dropout(cfg.dropout)

    def forward(self, x: Tensor, hops: Tensor, degree: Tensor, is_node: Optional[Tensor] = None) -> Tensor:
        """x [B, N, hidden]; hops [B, N, N] long, -1 where there is no path;
        degree [B, N] long; is_node [B, N] bool, True for nodes, False for padding."""
        b, n, c = x.shape
        y = self.norm(x + self.degree(degree.clamp(max=self.cfg.max_degree)))
        q, k, v = (
            t.view(b, n, self.cfg.heads, -1).transpose(1, 2)
            for t in self.qkv(y).split(c, dim=-1)
        )
        bias = self.hop_bias(hops)
        if is_node is not None:
            bias = bias.masked_fill(~is_node[:, None, None, :], torch.finfo(bias.dtype).min)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, dropout_p=self.cfg.dropout)
        y = self.out(y.transpose(1, 2).reshape(b, n, c))
        return x + self.out_drop(y)


if __name__ == "__main__":
    cfg = GraphTransformerConfig()
    net = GraphTransformerAttention(cfg)
    h = torch.randint(-1, 12, (2, 7, 7))
    print(net(torch.randn(2, 7, 64), h, torch.randint(0, 5, (2, 7))).shape)
