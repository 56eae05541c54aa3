import math

import torch
import torch.nn as nn


def build_alibi(attention_mask: torch.Tensor, num_heads: int, dtype: torch.dtype) -> torch.Tensor:
    """(batch, seq) 0/1 mask -> (batch * heads, 1, seq). Softmax is translation invariant, so slope * j will do."""
    closest = 2 ** math.floor(math.log2(num_heads))
    base = 2.0 ** (-(2.0 ** -(math.log2(closest) - 3)))
    slopes = [base ** i for i in range(1, closest + 1)]
    if closest != num_heads:
        extra_base = 2.0 ** (-(2.0 ** -(math.log2(2 * closest) - 3)))
        n_rest = min(closest, num_heads - closest)
        slopes += [extra_base ** i for i in range(1, 1 + 2 * n_rest, 2)]
    slopes = torch.tensor(slopes, device=attention_mask.device)
    positions = ((attention_mask.cumsum(dim=-1) - 1) * attention_mask)[:, None, :]
    alibi = slopes[..., None] * positions
    return alibi.reshape(attention_mask.shape[0] * num_heads, 1, attention_mask.shape[1]).to(dtype)


class AlibiAttention(nn.Module):
    """BLOOM style attention with fused qkv and the bias added inside of baddbmm."""

    def __init__(self, hidden_size: int, n_head: int, attention_dropout: float = 0.0):
        super().__init__()
        if hidden_size % n_head:
            raise ValueError(f"hidden_size {hidden_size} is not divisible by n_head {n_head}")
        self.num_heads = n_head
        self.head_dim = hidden_size // n_head
        self.inv_norm_factor = 1.0 / math.sqrt(self.head_dim)
        self.query_key_value = nn.Linear(hidden_size, 3 * hidden_size, bias=True)
        self.dense = nn.Linear(hidden_size, hidden_size)
        self.attention_dropout = nn.Dropout(attention_dropout)

    def forward(self, hidden_states: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        bsz, seq, _ = hidden_states.shape
        fused = self.query_key_value(hidden_states).view(bsz, seq, self.num_heads, 3, self.head_dim)
        q, k, v = fused[..., 0, :], fused[..., 1, :], fused[..., 2, :]
        q = q.transpose(1, 2).reshape(bsz * self.num_heads, seq, self.head_dim)
        k = k.permute(0, 2, 3, 1).reshape(bsz * self.num_heads, self.head_dim, seq)
        v = v.transpose(1, 2).reshape(bsz * self.num_heads, seq, self.head_dim)

        alibi = build_alibi(attention_mask, self.num_heads, q.dtype).expand(-1, seq, -1)
        scores = torch.baddbmm(alibi, q, k, beta=self.inv_norm_factor, alpha=self.inv_norm_factor)
        scores = scores.view(bsz, self.num_heads, seq, seq)

        causal = torch.ones(seq, seq, dtype=torch.bool, device=q.device).tril()
        allowed = causal[None, None] & attention_mask.bool()[:, None, None, :]
        scores = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min)

        probs = self.attention_dropout(torch.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype))
        ctx = torch.bmm(probs.view(bsz * self.num_heads, seq, seq), v)
        ctx = ctx.view(bsz, self.num_heads, seq, self.head_dim).transpose(1, 2).reshape(bsz, seq, -1)
        return self.dense(ctx)
