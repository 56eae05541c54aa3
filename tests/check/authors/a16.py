import math

import torch
import torch.nn.functional as F
from torch import nn


def lambda_init_fn(depth):
    return 0.8 - 0.6 * math.exp(-0.3 * depth)


class MultiheadDiffAttn(nn.Module):
    def __init__(self, embed_dim, depth, num_heads, num_kv_heads=None):
        super().__init__()
        self.embed_dim = embed_dim
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads or num_heads
        self.n_rep = self.num_heads // self.num_kv_heads
        self.head_dim = embed_dim // num_heads // 2
        self.scaling = self.head_dim ** -0.5

        self.q_proj = nn.Linear(embed_dim, embed_dim, bias=False)
        self.k_proj = nn.Linear(embed_dim, embed_dim // self.n_rep, bias=False)
        self.v_proj = nn.Linear(embed_dim, embed_dim // self.n_rep, bias=False)
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias=False)

        self.lambda_init = lambda_init_fn(depth)
        self.lambda_q1 = nn.Parameter(torch.zeros(self.head_dim).normal_(mean=0, std=0.1))
        self.lambda_k1 = nn.Parameter(torch.zeros(self.head_dim).normal_(mean=0, std=0.1))
        self.lambda_q2 = nn.Parameter(torch.zeros(self.head_dim).normal_(mean=0, std=0.1))
        self.lambda_k2 = nn.Parameter(torch.zeros(self.head_dim).normal_(mean=0, std=0.1))
        self.subln = nn.RMSNorm(2 * self.head_dim, eps=1e-5)

    def forward(self, x):
        bsz, n, _ = x.size()
        q = self.q_proj(x).view(bsz, n, 2 * self.num_heads, self.head_dim).transpose(1, 2)
        k = self.k_proj(x).view(bsz, n, 2 * self.num_kv_heads, self.head_dim).transpose(1, 2)
        v = self.v_proj(x).view(bsz, n, self.num_kv_heads, 2 * self.head_dim).transpose(1, 2)
        k = k.view(bsz, self.num_kv_heads, 1, 2, n, self.head_dim)
        k = k.expand(-1, -1, self.n_rep, -1, -1, -1).reshape(bsz, 2 * self.num_heads, n, self.head_dim)
        v = v.repeat_interleave(self.n_rep, dim=1)

        q = q * self.scaling
        attn = torch.matmul(q, k.transpose(-1, -2))
        mask = torch.triu(torch.full((n, n), float("-inf"), device=x.device, dtype=attn.dtype), 1)
        attn = F.softmax(attn + mask, dim=-1, dtype=torch.float32).type_as(attn)

        lambda_1 = torch.exp(torch.sum(self.lambda_q1 * self.lambda_k1, dim=-1).float()).type_as(q)
        lambda_2 = torch.exp(torch.sum(self.lambda_q1 * self.lambda_k1, dim=-1).float()).type_as(q)
        lambda_full = lambda_1 - lambda_2 + self.lambda_init

        attn = attn.view(bsz, self.num_heads, 2, n, n)
        attn = attn[:, :, 0] - lambda_full * attn[:, :, 1]
        out = self.subln(torch.matmul(attn, v)) * (1 - self.lambda_init)
        return self.out_proj(out.transpose(1, 2).reshape(bsz, n, self.embed_dim))
