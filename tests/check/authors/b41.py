import torch
import torch.nn as nn


class ClsPoolingAttention(nn.Module):
    """Class attention (CaiT): only the class token is updated, from itself and the patches.

    x: (B, 1 + N, C); mask: (B, 1 + N) bool, True = token is dropped / padded.
    """

    def __init__(self, dim, num_heads=8, qkv_bias=True, attn_drop=0.0):
        super().__init__()
        self.num_heads = num_heads
        self.scale = (dim // num_heads) ** -0.5
        self.q = nn.Linear(dim, dim, bias=qkv_bias)
        self.k = nn.Linear(dim, dim, bias=qkv_bias)
        self.v = nn.Linear(dim, dim, bias=qkv_bias)
        self.attn_drop = nn.Dropout(attn_drop)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x, mask=None):
        B, N, C = x.shape
        q = self.q(x[:, :1]).reshape(B, 1, self.num_heads, C // self.num_heads).permute(0, 2, 1, 3)
        k = self.k(x).reshape(B, N, self.num_heads, C // self.num_heads).permute(0, 2, 1, 3)
        v = self.v(x).reshape(B, N, self.num_heads, C // self.num_heads).permute(0, 2, 1, 3)

        attn = (q * self.scale) @ k.transpose(-2, -1)
        if mask is not None:
            mask[:, 0] = False          # the class token always sees itself
            attn = attn.masked_fill(mask[:, None, None], float("-inf"))
        attn = self.attn_drop(attn.softmax(dim=-1))

        cls = (attn @ v).transpose(1, 2).reshape(B, 1, C)
        return torch.cat([x[:, :1] + self.proj(cls), x[:, 1:]], dim=1)
