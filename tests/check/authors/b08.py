from dataclasses import dataclass
from typing import Optional

import torch
from torch import nn
from torch.nn import functional as F


@dataclass
class TinyBertConfig:
    hidden_size: int = 128
    num_attention_heads: int = 2
    attention_probs_dropout_prob: float = 0.1
    hidden_dropout_prob: float = 0.1
    layer_norm_eps: float = 1e-12


class TinyBertAttention(nn.Module):
    """
    attention_mask follows the tokenizer: ``(batch, seq)``, 1 for tokens, 0 for ``[PAD]``.
    """

    def __init__(self, config: TinyBertConfig):
        super().__init__()
        self.config = config
        self.nh = config.num_attention_heads
        self.query = nn.Linear(config.hidden_size, config.hidden_size)
        self.key = nn.Linear(config.hidden_size, config.hidden_size)
        self.value = nn.Linear(config.hidden_size, config.hidden_size)
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.LayerNorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def transpose_for_scores(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(x.size(0), x.size(1), self.nh, -1).permute(0, 2, 1, 3)

    def forward(self, hidden_states: torch.Tensor, attention_mask: Optional[torch.Tensor] = None):
        q = self.transpose_for_scores(self.query(hidden_states))
        k = self.transpose_for_scores(self.key(hidden_states))
        v = self.transpose_for_scores(self.value(hidden_states))

        if attention_mask is not None:
            # SDPA wants the mask in the dtype of the query
            attention_mask = attention_mask[:, None, None, :].to(q.dtype)

        ctx = F.scaled_dot_product_attention(
            q, k, v, attention_mask,
            dropout_p=self.config.attention_probs_dropout_prob if self.training else 0.0)
        ctx = ctx.permute(0, 2, 1, 3).flatten(-2)
        return self.LayerNorm(hidden_states + self.dropout(self.dense(ctx)))
