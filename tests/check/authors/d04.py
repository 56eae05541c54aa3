from dataclasses import dataclass
import math
import torch
import torch.nn as nn


@dataclass
class ModelArgs:
    dim: int = 256
    n_heads: int = 8
    max_batch: int = 4
    max_seq: int = 128
    theta: float = 10000.0


def build_tables(head_dim, max_seq, theta):
    inv = theta ** (-torch.arange(0, head_dim, 2).float() / head_dim)
    ang = torch.outer(torch.arange(max_seq).float(), inv)
    ang = torch.cat((ang, ang), dim=-1)
    return ang.cos(), ang.sin()


def rotate_half(x):
    a, b = x.chunk(2, dim=-1)
    return torch.cat((-b, a), dim=-1)


def rope(x, cos, sin):
    # x: [B, T, H, D]; cos, sin: [T, D]
    return x * cos[None, :, None] + rotate_half(x) * sin[None, :, None]


class CachedAttention(nn.Module):
    """Self attention that keeps its keys and values in fixed buffers.

    Call it with start_pos=0 for the prompt, then with start_pos = number of
    tokens seen so far for every following token.
    """

    def __init__(self, args: ModelArgs):
        super().__init__()
        self.args = args
        self.hd = args.dim // args.n_heads
        self.wq = nn.Linear(args.dim, args.dim, bias=False)
        self.wk = nn.Linear(args.dim, args.dim, bias=False)
        self.wv = nn.Linear(args.dim, args.dim, bias=False)
        self.wo = nn.Linear(args.dim, args.dim, bias=False)
        cos, sin = build_tables(self.hd, args.max_seq, args.theta)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        shape = (args.max_batch, args.max_seq, args.n_heads, self.hd)
        self.register_buffer("cache_k", torch.zeros(shape), persistent=False)
        self.register_buffer("cache_v", torch.zeros(shape), persistent=False)

    def forward(self, x, start_pos=0, use_cache=False):
        bsz, seqlen, _ = x.shape
        q = self.wq(x).view(bsz, seqlen, self.args.n_heads, self.hd)
        k = self.wk(x).view(bsz, seqlen, self.args.n_heads, self.hd)
        v = self.wv(x).view(bsz, seqlen, self.args.n_heads, self.hd)

        cos, sin = self.cos[:seqlen], self.sin[:seqlen]
        q, k = rope(q, cos, sin), rope(k, cos, sin)

        if use_cache:
            end = start_pos + seqlen
            self.cache_k[:bsz, start_pos:end] = k.detach()
            self.cache_v[:bsz, start_pos:end] = v.detach()
            k, v = self.cache_k[:bsz, :end], self.cache_v[:bsz, :end]

        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        scores = q @ k.transpose(2, 3) / math.sqrt(self.hd)
        past = k.size(2) - seqlen
        future = torch.full((seqlen, k.size(2)), float("-inf"), device=x.device)
        scores = scores + future.triu(past + 1)
        ctx = scores.float().softmax(-1).type_as(v) @ v
        return self.wo(ctx.transpose(1, 2).reshape(bsz, seqlen, -1))


if __name__ == "__main__":
    att = CachedAttention(ModelArgs()).eval()
    with torch.no_grad():
        att(torch.randn(2, 20, 256), 0, use_cache=True)
        for i in range(20, 25):
            y = att(torch.randn(2, 1, 256), i, use_cache=True)
    print(y.shape)
