import torch
import torch.nn as nn
import torch.nn.functional as F


class DecoderCrossAttention(nn.Module):
    """Cross attention from decoder states to encoder memory.

    The memory does not change between decoding steps, so at inference its
    keys and values are computed once and kept.
    """

    def __init__(self, dim, num_heads=8, dropout=0.1):
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = dim // num_heads
        self.p = dropout
        self.q = nn.Linear(dim, dim)
        self.kv = nn.Linear(dim, 2 * dim)
        self.proj = nn.Linear(dim, dim)
        self._cache = None

    def _project_memory(self, memory):
        B, S, _ = memory.shape
        kv = self.kv(memory).view(B, S, 2, self.num_heads, self.head_dim)
        k, v = kv.permute(2, 0, 3, 1, 4)
        return k, v

    def forward(self, x, memory, memory_mask=None):
        """memory_mask: (B, S) bool, True = attend."""
        B, T, C = x.shape
        q = self.q(x).view(B, T, self.num_heads, self.head_dim).transpose(1, 2)

        if self.training:
            k, v = self._project_memory(memory)
        else:
            if self._cache is None or self._cache[0].shape[0] != B or self._cache[0].shape[2] != memory.shape[1]:
                self._cache = self._project_memory(memory)
            k, v = self._cache

        mask = memory_mask[:, None, None, :] if memory_mask is not None else None
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask,
                                           dropout_p=self.p if self.training else 0.0)
        return self.proj(y.transpose(1, 2).reshape(B, T, C))
