"""Seq-first multi-head attention used in the captioning encoder."""
import torch
import torch.nn as nn
import torch.nn.functional as F


class SeqFirstMHA(nn.Module):
    # all tensors are (T, B, C), padding mask is (B, S) with True where padded

    def __init__(self, embed_dim, num_heads, kdim=None, attn_drop=0.0):
        super().__init__()
        kdim = kdim or embed_dim
        self.embed_dim = embed_dim
        self.num_heads = num_heads
        self.head_dim = embed_dim // num_heads
        self.scaling = self.head_dim ** -0.5
        self.attn_drop = attn_drop
        self.wq = nn.Linear(embed_dim, embed_dim)
        self.wk = nn.Linear(kdim, embed_dim)
        self.wv = nn.Linear(kdim, embed_dim)
        self.wo = nn.Linear(embed_dim, embed_dim)
        for m in (self.wq, self.wk, self.wv):
            nn.init.xavier_uniform_(m.weight)

    def forward(self, query, key, value, key_padding_mask=None):
        T, B, C = query.shape
        S = key.size(0)
        H, D = self.num_heads, self.head_dim

        q = self.wq(query) * self.scaling
        k = self.wk(key)
        v = self.wv(value)

        q = q.contiguous().view(T, B * H, D).transpose(0, 1)
        k = k.contiguous().view(S, B * H, D).transpose(0, 1)
        v = v.contiguous().view(S, B * H, D).transpose(0, 1)

        logits = torch.bmm(q, k.transpose(1, 2))  # (B*H, T, S)
        if key_padding_mask is not None:
            pad = key_padding_mask.repeat(H, 1).unsqueeze(1)
            logits = logits.masked_fill(pad, float("-inf"))

        w = F.softmax(logits.float(), dim=-1).type_as(logits)
        w = F.dropout(w, p=self.attn_drop, training=self.training)
        out = torch.bmm(w, v)
        out = out.transpose(0, 1).reshape(T, B, C)
        return self.wo(out), w.view(B, H, T, S).mean(1)
