import torch
import torch.nn as nn
import torch.nn.functional as F


class CachedSelfAttention(nn.Module):
    def __init__(self, d_in, d_out, context_length, num_heads, dropout=0.0, qkv_bias=False):
        super().__init__()
        assert d_out % num_heads == 0, "d_out must be divisible by num_heads"

        self.d_out = d_out
        self.num_heads = num_heads
        self.head_dim = d_out // num_heads

        self.W_query = nn.Linear(d_in, d_out, bias=qkv_bias)
        self.W_key = nn.Linear(d_in, d_out, bias=qkv_bias)
        self.W_value = nn.Linear(d_in, d_out, bias=qkv_bias)
        self.out_proj = nn.Linear(d_out, d_out)
        self.dropout = nn.Dropout(dropout)

        self.context_length = context_length
        self.register_buffer("cache_k", None, persistent=False)
        self.register_buffer("cache_v", None, persistent=False)

    def reset_cache(self):
        self.cache_k, self.cache_v = None, None

    def forward(self, x, use_cache=False):
        b, num_tokens, d_in = x.shape
        past = self.cache_k.shape[1] if use_cache and self.cache_k is not None else 0
        if past + num_tokens > self.context_length:
            raise RuntimeError(f"context of {past + num_tokens} tokens is over {self.context_length}")

        keys_new = self.W_key(x).view(b, num_tokens, self.num_heads, self.head_dim)
        values_new = self.W_value(x).view(b, num_tokens, self.num_heads, self.head_dim)
        queries = self.W_query(x).view(b, num_tokens, self.num_heads, self.head_dim)

        if use_cache:
            if self.cache_k is None:
                self.cache_k, self.cache_v = keys_new, values_new
            else:
                self.cache_k = torch.cat([self.cache_k, keys_new], dim=1)
                self.cache_v = torch.cat([self.cache_v, values_new], dim=1)
            keys, values = self.cache_k, self.cache_v
        else:
            keys, values = keys_new, values_new

        # (b, num_heads, num_tokens, head_dim)
        keys = keys.transpose(1, 2)
        queries = queries.transpose(1, 2)
        values = values.transpose(1, 2)

        attn_scores = queries @ keys.transpose(2, 3)

        num_tokens_K = keys.shape[-2]
        q_pos = torch.arange(num_tokens_K - num_tokens, num_tokens_K, device=x.device)
        k_pos = torch.arange(num_tokens_K, device=x.device)
        attn_scores = attn_scores.masked_fill(q_pos[:, None] < k_pos[None, :], -torch.inf)

        attn_weights = torch.softmax(attn_scores / self.head_dim ** 0.5, dim=-1)
        attn_weights = self.dropout(attn_weights)

        context_vec = (attn_weights @ values).transpose(1, 2)
        context_vec = context_vec.contiguous().view(b, num_tokens, self.d_out)
        return self.out_proj(context_vec)


if __name__ == "__main__":
    torch.manual_seed(123)
    mha = CachedSelfAttention(16, 16, context_length=32, num_heads=2).eval()
    with torch.no_grad():
        x = torch.rand(1, 6, 16)
        full = mha(x)
        steps = torch.cat([mha(x[:, i:i + 1], use_cache=True) for i in range(6)], dim=1)
        print("max diff", (full - steps).abs().max().item())
