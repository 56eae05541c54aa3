"""Cross attention used by the speech-to-text decoder."""
import math
from dataclasses import dataclass

import torch
import torch.nn as nn


@dataclass
class CrossAttnConfig:
    d_model: int = 256
    enc_dim: int = 320
    n_heads: int = 4
    dropout: float = 0.1


def lengths_to_mask(lengths, max_len):
    """True on real frames, False on the padding behind them."""
    steps = torch.arange(max_len, device=lengths.device)
    return steps[None, :] < lengths[:, None]


class EncDecAttention(nn.Module):
    """Decoder states look at the encoder frames.

    dec:          [B, T, d_model]
    enc:          [B, S, enc_dim]
    enc_lengths:  [B] number of valid frames per utterance
    """

    def __init__(self, cfg: CrossAttnConfig):
        super().__init__()
        assert cfg.d_model % cfg.n_heads == 0
        self.h = cfg.n_heads
        self.dk = cfg.d_model // cfg.n_heads
        self.norm = nn.LayerNorm(cfg.d_model)
        self.to_q = nn.Linear(cfg.d_model, cfg.d_model)
        self.to_k = nn.Linear(cfg.enc_dim, cfg.d_model)
        self.to_v = nn.Linear(cfg.enc_dim, cfg.d_model)
        self.proj = nn.Linear(cfg.d_model, cfg.d_model)
        self.drop = nn.Dropout(cfg.dropout)

    def split(self, t):
        b, n, _ = t.shape
        return t.view(b, n, self.h, self.dk).transpose(1, 2)

    def forward(self, dec, enc, enc_lengths):
        b, t, _ = dec.shape
        q = self.split(self.to_q(self.norm(dec)))
        k = self.split(self.to_k(enc))
        v = self.split(self.to_v(enc))

        scores = torch.matmul(q, k.transpose(-2, -1)) / math.sqrt(self.dk)
        keep = lengths_to_mask(enc_lengths, enc.size(1))
        scores = scores.masked_fill(~keep[:, None, None, :], 1e-9)
        attn = self.drop(torch.softmax(scores, dim=-1))

        out = torch.matmul(attn, v).transpose(1, 2).reshape(b, t, -1)
        return dec + self.proj(out)


if __name__ == "__main__":
    layer = EncDecAttention(CrossAttnConfig())
    y = layer(torch.randn(3, 9, 256), torch.randn(3, 40, 320), torch.tensor([40, 31, 12]))
    print(y.shape)
