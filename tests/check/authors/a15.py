import math

import torch
import torch.nn as nn


class PyFlashAttention(nn.Module):
    """Pure PyTorch re-implementation of the FlashAttention forward loop (causal).

    Never materialises the T x T matrix; keys are visited block by block with
    a running max and a running normaliser.
    """

    def __init__(self, d_model: int, n_heads: int, block_size: int = 64):
        super().__init__()
        self.n_heads = n_heads
        self.d_head = d_model // n_heads
        self.block_size = block_size
        self.in_proj = nn.Linear(d_model, 3 * d_model)
        self.out_proj = nn.Linear(d_model, d_model)

    def forward(self, x):
        B, T, C = x.shape
        qkv = self.in_proj(x).view(B, T, 3, self.n_heads, self.d_head)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        q = q / math.sqrt(self.d_head)

        acc = torch.zeros_like(q)
        m = torch.full((B, self.n_heads, T, 1), float("-inf"), device=x.device, dtype=x.dtype)
        l = torch.zeros((B, self.n_heads, T, 1), device=x.device, dtype=x.dtype)
        rows = torch.arange(T, device=x.device).unsqueeze(1)

        for start in range(0, T, self.block_size):
            stop = min(start + self.block_size, T)
            kb, vb = k[:, :, start:stop], v[:, :, start:stop]
            s = q @ kb.transpose(-1, -2)
            cols = torch.arange(start, stop, device=x.device).unsqueeze(0)
            s = s.masked_fill(cols > rows, float("-inf"))

            m_new = torch.maximum(m, s.amax(dim=-1, keepdim=True))
            p = torch.exp(s - m_new)
            correction = torch.exp(m - m_new)
            l = l * correction + p.sum(dim=-1, keepdim=True)
            acc = acc + p @ vb
            m = m_new

        out = acc / l
        return self.out_proj(out.transpose(1, 2).reshape(B, T, C))
