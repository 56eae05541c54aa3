import torch
import torch.nn as nn
import torch.nn.functional as F


class DownsampledKVAttention(nn.Module):
    """
    Attention for long speech inputs. Keys/values are computed on a strided
    version of the sequence, queries stay at full rate.

    x : (B, T, D)
    pad_mask : (B, T)  True = padding
    """

    def __init__(self, d_model=256, nhead=4, stride=2, dropout=0.1):
        super().__init__()
        self.nhead = nhead
        self.dk = d_model // nhead
        self.stride = stride
        self.down = nn.Conv1d(d_model, d_model, kernel_size=3, stride=stride, padding=1, groups=d_model)
        self.w_q = nn.Linear(d_model, d_model)
        self.w_k = nn.Linear(d_model, d_model)
        self.w_v = nn.Linear(d_model, d_model)
        self.w_o = nn.Linear(d_model, d_model)
        self.attn_dropout = nn.Dropout(dropout)

    def forward(self, x, pad_mask=None):
        B, T, D = x.size()
        if pad_mask is not None:
            x = x.masked_fill(pad_mask.unsqueeze(-1), 0.0)

        short = self.down(x.transpose(1, 2)).transpose(1, 2)
        S = short.size(1)

        q = self.w_q(x).view(B, T, self.nhead, self.dk).transpose(1, 2)
        k = self.w_k(short).view(B, S, self.nhead, self.dk).transpose(1, 2)
        v = self.w_v(short).view(B, S, self.nhead, self.dk).transpose(1, 2)

        scores = torch.matmul(q, k.transpose(-2, -1)) / (self.dk ** 0.5)
        if pad_mask is not None:
            # bring the mask to the reduced length
            kv_mask = pad_mask[:, :S]
            scores = scores.masked_fill(kv_mask.view(B, 1, 1, S), -1e4)
        attn = self.attn_dropout(F.softmax(scores, dim=-1))
        out = torch.matmul(attn, v).transpose(1, 2).contiguous().view(B, T, D)
        return self.w_o(out)
