import torch
import torch.nn as nn


def make_pad_mask(lengths, max_len):
    """True at the frames past the end. lengths: (B,) -> (B, max_len)"""
    return torch.arange(max_len, device=lengths.device)[None, :] >= lengths[:, None]


class SpeechSelfAttention(nn.Module):
    """Self-attention over acoustic frames.

    xs      : (B, T, idim)
    xs_lens : (B,) number of valid frames of each utterance
    """

    def __init__(self, idim, adim=256, aheads=4, dropout_rate=0.0):
        super().__init__()
        assert adim % aheads == 0
        self.h = aheads
        self.dk = adim // aheads
        self.linear_q = nn.Linear(idim, adim)
        self.linear_k = nn.Linear(idim, adim)
        self.linear_v = nn.Linear(idim, adim)
        self.linear_out = nn.Linear(adim, idim)
        self.dropout = nn.Dropout(p=dropout_rate)

    def _fold(self, x):
        # (B, T, H * D) -> (B * H, T, D)
        B, T, _ = x.shape
        return x.view(B, T, self.h, self.dk).transpose(1, 2).reshape(B * self.h, T, self.dk)

    def forward(self, xs, xs_lens=None):
        B, T, _ = xs.shape
        q = self._fold(self.linear_q(xs))
        k = self._fold(self.linear_k(xs))
        v = self._fold(self.linear_v(xs))

        scores = torch.bmm(q, k.transpose(1, 2)) * self.dk ** -0.5
        if xs_lens is not None:
            pad = make_pad_mask(xs_lens, T).unsqueeze(1)          # (B, 1, T)
            pad = pad.repeat(self.h, 1, 1)                        # (B * H, 1, T)
            scores = scores.masked_fill(pad, torch.finfo(scores.dtype).min)

        attn = self.dropout(torch.softmax(scores, dim=-1))
        ctx = torch.bmm(attn, v).view(B, self.h, T, self.dk).transpose(1, 2)
        return self.linear_out(ctx.reshape(B, T, self.h * self.dk))
