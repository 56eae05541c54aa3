import torch
import torch.nn.functional as F
from torch import nn


class FrameCausalAttention(nn.Module):
    """
    Joint space-time attention for a video predictor.

    Tokens come as [B, T, N, C] (frames, patches). A token sees all patches of
    its own frame and of the frames before it, never a later frame.
    """

    def __init__(self, dim, n_heads=6, max_frames=16):
        super().__init__()
        self.n_heads = n_heads
        self.frame_pos = nn.Embedding(max_frames, dim)
        self.ln = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, dim * 3, bias=False)
        self.proj = nn.Linear(dim, dim, bias=False)
        self.max_frames = max_frames
        self._cache = {}

    def visible(self, t, n, device):
        """[t * n, t * n] bool, True = may attend."""
        key = (t, n, device)
        if key not in self._cache:
            frames = torch.ones(t, t, dtype=torch.bool, device=device).tril()
            self._cache[key] = frames.repeat(n, n)
        return self._cache[key]

    def forward(self, x):
        B, T, N, C = x.shape
        if T > self.max_frames:
            raise ValueError("clip too long")
        pos = self.frame_pos(torch.arange(T, device=x.device))
        y = self.ln(x + pos[None, :, None, :]).reshape(B, T * N, C)

        q, k, v = self.qkv(y).chunk(3, dim=2)
        q = q.view(B, T * N, self.n_heads, -1).transpose(1, 2)
        k = k.view(B, T * N, self.n_heads, -1).transpose(1, 2)
        v = v.view(B, T * N, self.n_heads, -1).transpose(1, 2)

        y = F.scaled_dot_product_attention(q, k, v, attn_mask=self.visible(T, N, x.device))
        y = y.transpose(1, 2).reshape(B, T, N, C)
        return x + self.proj(y)


if __name__ == "__main__":
    m = FrameCausalAttention(96)
    print(m(torch.randn(2, 5, 12, 96)).shape)
