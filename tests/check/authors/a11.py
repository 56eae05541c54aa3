import torch
import torch.nn as nn


def rotate_half(x):
    x1 = x[..., : x.shape[-1] // 2]
    x2 = x[..., x.shape[-1] // 2 :]
    return torch.cat((-x2, x1), dim=-1)


def apply_rope(x, cos, sin):
    return x * cos + rotate_half(x) * sin


class RoPESelfAttention(nn.Module):
    def __init__(self, d_model, num_heads, max_len=1024, base=10_000):
        super().__init__()
        self.num_heads = num_heads
        self.d_head = d_model // num_heads
        self.qkv = nn.Linear(d_model, 3 * d_model, bias=False)
        self.out = nn.Linear(d_model, d_model, bias=False)

        theta = base ** (-torch.arange(0, self.d_head, 2, dtype=torch.float) / self.d_head)
        angles = torch.arange(max_len, dtype=torch.float).unsqueeze(1) * theta.unsqueeze(0)
        angles = torch.repeat_interleave(angles, 2, dim=-1)   # [max_len, d_head]
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, x):
        b, n, d = x.shape
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        q = q.reshape(b, n, self.num_heads, self.d_head).transpose(1, 2)
        k = k.reshape(b, n, self.num_heads, self.d_head).transpose(1, 2)
        v = v.reshape(b, n, self.num_heads, self.d_head).transpose(1, 2)

        q = apply_rope(q, self.cos[:n], self.sin[:n])
        k = apply_rope(k, self.cos[:n], self.sin[:n])

        att = (q @ k.mT) / self.d_head ** 0.5
        keep = torch.ones(n, n, device=x.device, dtype=torch.bool).tril()
        att = att.masked_fill(keep.logical_not(), float("-inf")).softmax(-1)
        return self.out((att @ v).transpose(1, 2).reshape(b, n, d))
