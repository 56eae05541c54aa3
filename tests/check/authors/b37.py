import torch
import torch.nn as nn
import torch.nn.functional as F


class CoAttention(nn.Module):
    """Two streams (image regions / question words) attend to each other."""

    def __init__(self, dim_v, dim_q, dim, heads=4, dropout=0.1):
        super().__init__()
        self.heads = heads
        self.dim_head = dim // heads
        self.dropout = dropout
        self.v_qkv = nn.Linear(dim_v, dim * 3)
        self.q_qkv = nn.Linear(dim_q, dim * 3)
        self.v_out = nn.Linear(dim, dim_v)
        self.q_out = nn.Linear(dim, dim_q)

    def split(self, t):
        B, N, _ = t.shape
        return t.view(B, N, 3, self.heads, self.dim_head).permute(2, 0, 3, 1, 4).unbind(0)

    def attend(self, q, k, v, key_mask):
        logits = q @ k.transpose(-1, -2) * self.dim_head ** -0.5
        if key_mask is not None:
            logits = logits.masked_fill(key_mask[:, None, None, :].logical_not(), -1e4)
        probs = F.dropout(F.softmax(logits, dim=-1), self.dropout)
        return (probs @ v).transpose(1, 2).flatten(2)

    def forward(self, img, txt, img_mask=None, txt_mask=None):
        # masks: True = valid
        qi, ki, vi = self.split(self.v_qkv(img))
        qt, kt, vt = self.split(self.q_qkv(txt))
        img = img + self.v_out(self.attend(qi, kt, vt, txt_mask))
        txt = txt + self.q_out(self.attend(qt, ki, vi, img_mask))
        return img, txt
