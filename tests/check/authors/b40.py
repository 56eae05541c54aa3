import torch
import torch.nn as nn
import torch.nn.functional as F


def rotate_half(x):
    x1, x2 = x.chunk(2, dim=-1)
    return torch.cat((-x2, x1), dim=-1)


class RotaryAudioAttention(nn.Module):
    """Bidirectional attention over spectrogram frames with rotary positions.

    frames (B, T, D), pad (B, T) bool True for padded frames
    """

    def __init__(self, dim: int, n_heads: int, base: float = 10000.0, dropout: float = 0.0):
        super().__init__()
        self.n_heads = n_heads
        self.head_dim = dim // n_heads
        assert self.head_dim % 2 == 0
        self.dropout = dropout
        inv_freq = base ** (-torch.arange(0, self.head_dim, 2).float() / self.head_dim)
        self.register_buffer("inv_freq", inv_freq, persistent=False)
        self.wqkv = nn.Linear(dim, 3 * dim, bias=False)
        self.wo = nn.Linear(dim, dim, bias=False)

    def rotary(self, T, device):
        t = torch.arange(T, device=device, dtype=torch.float32)
        freqs = torch.outer(t, self.inv_freq.float())
        emb = freqs.repeat_interleave(2, dim=-1)
        return emb.cos(), emb.sin()

    def forward(self, frames, pad=None):
        B, T, D = frames.shape
        q, k, v = self.wqkv(frames).view(B, T, 3, self.n_heads, self.head_dim).permute(2, 0, 3, 1, 4)

        cos, sin = self.rotary(T, frames.device)
        cos, sin = cos.to(q.dtype), sin.to(q.dtype)
        q = q * cos + rotate_half(q) * sin
        k = k * cos + rotate_half(k) * sin

        mask = None if pad is None else ~pad[:, None, None, :]
        y = F.scaled_dot_product_attention(q, k, v, mask, self.dropout if self.training else 0.0)
        return self.wo(y.transpose(1, 2).reshape(B, T, D))
