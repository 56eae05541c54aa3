"""GQA block with a learned sink logit per head."""
from dataclasses import dataclass

import torch
from torch import nn


@dataclass
class SinkConfig:
    hidden_size: int = 128
    num_attention_heads: int = 8
    num_key_value_heads: int = 2
    head_dim: int = 16
    sliding_window: int = 0


def sdpa_with_sinks(Q, K, V, sinks, sm_scale, sliding_window=0):
    """Q: [B, T, n_kv, g, d]  K, V: [B, T, n_kv, d]  sinks: [n_kv * g]

    The sink is one more logit in every row. It takes part of the attention
    mass and has no value vector, so that a head can leave a token alone.
    """
    B, T, n_kv, g, d = Q.shape
    QK = torch.einsum("bqkgd,bskd->bkgqs", Q, K) * sm_scale
    mask = torch.triu(QK.new_full((T, T), -float("inf")), diagonal=1)
    if sliding_window > 0:
        mask = mask + torch.tril(
            mask.new_full((T, T), -float("inf")), diagonal=-sliding_window
        )
    QK = QK + mask
    S = sinks.view(1, n_kv, g, 1, 1).expand(B, -1, -1, T, 1)
    W = torch.softmax(torch.cat([QK, S], dim=-1), dim=-1)
    W = W[..., :-1]
    W = W / W.sum(dim=-1, keepdim=True)
    out = torch.einsum("bkgqs,bskd->bqkgd", W, V)
    return out.reshape(B, T, n_kv * g * d)


class SinkAttention(nn.Module):
    def __init__(self, cfg: SinkConfig):
        super().__init__()
        self.cfg = cfg
        self.groups = cfg.num_attention_heads // cfg.num_key_value_heads
        self.sinks = nn.Parameter(torch.zeros(cfg.num_attention_heads))
        self.norm = nn.RMSNorm(cfg.hidden_size, eps=1e-5)
        width = cfg.head_dim * (cfg.num_attention_heads + 2 * cfg.num_key_value_heads)
        self.qkv = nn.Linear(cfg.hidden_size, width)
        self.out = nn.Linear(cfg.head_dim * cfg.num_attention_heads, cfg.hidden_size)
        self.sm_scale = cfg.head_dim ** -0.5

    def forward(self, x):
        c = self.cfg
        B, T, _ = x.shape
        nq = c.num_attention_heads * c.head_dim
        nk = c.num_key_value_heads * c.head_dim
        q, k, v = self.qkv(self.norm(x)).split([nq, nk, nk], dim=-1)
        q = q.view(B, T, c.num_key_value_heads, self.groups, c.head_dim)
        k = k.view(B, T, c.num_key_value_heads, c.head_dim)
        v = v.view(B, T, c.num_key_value_heads, c.head_dim)
        y = sdpa_with_sinks(q, k, v, self.sinks, self.sm_scale, c.sliding_window)
        return x + self.out(y)


if __name__ == "__main__":
    print(SinkAttention(SinkConfig(sliding_window=6))(torch.randn(2, 18, 128)).shape)
