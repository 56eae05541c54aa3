import torch
import torch.nn as nn
import torch.nn.functional as F


class FlashCausalAttention(nn.Module):
    def __init__(self, d_model: int, n_heads: int, dropout: float = 0.1):
        super().__init__()
        assert d_model % n_heads == 0, "d_model must be a multiple of n_heads"
        self.n_heads = n_heads
        self.d_head = d_model // n_heads
        self.dropout = dropout
        self.to_qkv = nn.Linear(d_model, d_model * 3, bias=False)
        self.to_out = nn.Linear(d_model, d_model)

    def forward(self, x, pad_mask=None):
        """
        x        : (batch, seq, d_model)
        pad_mask : (batch, seq) 1 = keep, 0 = pad
        """
        bsz, seq, _ = x.shape
        q, k, v = self.to_qkv(x).chunk(3, dim=-1)
        q = q.view(bsz, seq, self.n_heads, self.d_head).transpose(1, 2)
        k = k.view(bsz, seq, self.n_heads, self.d_head).transpose(1, 2)
        v = v.view(bsz, seq, self.n_heads, self.d_head).transpose(1, 2)

        # 1 = may attend, 0 = may not
        mask = torch.tril(torch.ones(seq, seq, device=x.device, dtype=x.dtype))[None, None]
        if pad_mask is not None:
            mask = mask * pad_mask[:, None, None, :].to(x.dtype)

        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, dropout_p=self.dropout if self.training else 0.0
        )
        out = out.transpose(1, 2).contiguous().view(bsz, seq, -1)
        return self.to_out(out)
