import torch
import torch.nn as nn


class SourceTargetAttention(nn.Module):
    """Encoder-decoder attention, written keys-by-queries so that attention maps
    plot with the source on the vertical axis."""

    def __init__(self, d_tgt, d_src, d_att, n_heads):
        super().__init__()
        assert d_att % n_heads == 0
        self.n_heads, self.d_h = n_heads, d_att // n_heads
        self.query = nn.Linear(d_tgt, d_att)
        self.key = nn.Linear(d_src, d_att, bias=False)   # a key bias cancels in the softmax
        self.value = nn.Linear(d_src, d_att)
        self.out = nn.Linear(d_att, d_tgt)
        self.last_map = None

    def forward(self, tgt, src, src_mask=None):
        # tgt [B,T,*]  src [B,S,*]  src_mask [B,S], nonzero = real token
        B, T = tgt.shape[:2]
        S = src.shape[1]
        q = self.query(tgt).view(B, T, self.n_heads, self.d_h)
        k = self.key(src).view(B, S, self.n_heads, self.d_h)
        v = self.value(src).view(B, S, self.n_heads, self.d_h)

        energy = torch.einsum('bshd,bthd->bhst', k, q) * self.d_h ** -0.5
        if src_mask is not None:
            dead = src_mask.bool().logical_not()
            energy = energy.masked_fill(dead[:, None, :, None], torch.finfo(energy.dtype).min)
        alpha = torch.softmax(energy, dim=2)
        self.last_map = alpha.detach()

        ctx = torch.einsum('bhst,bshd->bthd', alpha, v)
        return self.out(ctx.reshape(B, T, -1))
