import torch
import torch.nn as nn
import torch.nn.functional as F


class MemoryAttention(nn.Module):
    """Left-to-right attention with `n_mem` learned key/value slots.

    The slots are in front of the sequence and are open to every token; among
    the tokens each one looks at itself and at what came before.
    """

    def __init__(self, d_model, n_head, n_mem=8, dropout=0.0):
        super().__init__()
        self.n_head = n_head
        self.d_head = d_model // n_head
        self.dropout = dropout
        self.c_attn = nn.Linear(d_model, 3 * d_model)
        self.c_proj = nn.Linear(d_model, d_model)
        self.mem_k = nn.Parameter(torch.randn(n_head, n_mem, self.d_head) * self.d_head ** -0.5)
        self.mem_v = nn.Parameter(torch.randn(n_head, n_mem, self.d_head) * n_mem ** -0.5)

    def with_memory(self, mem, t):
        return torch.cat([mem.expand(t.size(0), -1, -1, -1), t], dim=2)

    def forward(self, x):
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(C, dim=2)
        q = q.view(B, T, self.n_head, self.d_head).transpose(1, 2)
        k = k.view(B, T, self.n_head, self.d_head).transpose(1, 2)
        v = v.view(B, T, self.n_head, self.d_head).transpose(1, 2)

        k = self.with_memory(self.mem_k, k)
        v = self.with_memory(self.mem_v, v)

        y = F.scaled_dot_product_attention(
            q, k, v,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=True,
        )
        y = y.transpose(1, 2).contiguous().view(B, T, C)
        return self.c_proj(y)


class Block(nn.Module):
    def __init__(self, d_model, n_head, n_mem=8):
        super().__init__()
        self.ln1 = nn.LayerNorm(d_model)
        self.attn = MemoryAttention(d_model, n_head, n_mem)
        self.ln2 = nn.LayerNorm(d_model)
        self.mlp = nn.Sequential(
            nn.Linear(d_model, 4 * d_model), nn.GELU(), nn.Linear(4 * d_model, d_model)
        )

    def forward(self, x):
        x = x + self.attn(self.ln1(x))
        return x + self.mlp(self.ln2(x))


if __name__ == "__main__":
    print(Block(64, 4)(torch.randn(2, 24, 64)).shape)
