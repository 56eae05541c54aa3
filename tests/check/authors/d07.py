import torch
import torch.nn as nn
import torch.nn.functional as F


class EncoderSelfAttention(nn.Module):
    """Drop-in for nn.MultiheadAttention in our encoder (self attention only).

    Args:
        x: (B, S, E)
        key_padding_mask: (B, S) bool, same meaning as in
            nn.MultiheadAttention: True marks positions that are padding.
        need_weights: also return the weights averaged over the heads.
    """

    def __init__(self, embed_dim: int, num_heads: int, dropout: float = 0.0):
        super().__init__()
        assert embed_dim % num_heads == 0, "embed_dim must be divisible by num_heads"
        self.num_heads = num_heads
        self.head_dim = embed_dim // num_heads
        self.dropout = dropout
        self.in_proj_weight = nn.Parameter(torch.empty(3 * embed_dim, embed_dim))
        self.in_proj_bias = nn.Parameter(torch.zeros(3 * embed_dim))
        self.out_proj = nn.Linear(embed_dim, embed_dim)
        nn.init.xavier_uniform_(self.in_proj_weight)
        nn.init.zeros_(self.out_proj.bias)

    @staticmethod
    def extend_mask(key_padding_mask, dtype):
        """(B, S) -> additive (B, 1, 1, S)."""
        mask = key_padding_mask[:, None, None, :].to(dtype)
        return (1.0 - mask) * -10000.0

    def forward(self, x, key_padding_mask=None, need_weights=False):
        B, S, E = x.shape
        qkv = F.linear(x, self.in_proj_weight, self.in_proj_bias)
        qkv = qkv.view(B, S, 3, self.num_heads, self.head_dim)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)

        attn_bias = None
        if key_padding_mask is not None:
            attn_bias = self.extend_mask(key_padding_mask, q.dtype)

        if need_weights:
            scores = q @ k.transpose(-2, -1) * self.head_dim ** -0.5
            if attn_bias is not None:
                scores = scores + attn_bias
            weights = scores.softmax(dim=-1)
            ctx = F.dropout(weights, self.dropout, self.training) @ v
        else:
            weights = None
            ctx = F.scaled_dot_product_attention(
                q, k, v, attn_mask=attn_bias,
                dropout_p=self.dropout if self.training else 0.0,
            )
        out = self.out_proj(ctx.transpose(1, 2).reshape(B, S, E))
        if need_weights:
            return out, weights.mean(dim=1)
        return out, None


if __name__ == "__main__":
    att = EncoderSelfAttention(64, 4)
    pad = torch.arange(11)[None, :] >= torch.tensor([11, 8, 5])[:, None]
    y, w = att(torch.randn(3, 11, 64), pad, need_weights=True)
    print(y.shape, w.shape)
