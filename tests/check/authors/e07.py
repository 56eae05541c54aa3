# seq2seq with attention, Bahdanau et al. 2015
import torch
import torch.nn as nn
import torch.nn.functional as F


class BahdanauAttention(nn.Module):
    def __init__(self, enc_hid_dim, dec_hid_dim, attn_dim=64):
        super(BahdanauAttention, self).__init__()
        self.W_enc = nn.Linear(enc_hid_dim, attn_dim, bias=False)
        self.W_dec = nn.Linear(dec_hid_dim, attn_dim, bias=True)
        self.v = nn.Linear(attn_dim, 1, bias=False)

    def forward(self, hidden, encoder_outputs, src_mask=None):
        # hidden = [batch, dec_hid_dim]
        # encoder_outputs = [src len, batch, enc_hid_dim]  (straight from nn.GRU)
        # src_mask = [src len, batch], 1 for tokens and 0 for <pad>
        energy = torch.tanh(self.W_enc(encoder_outputs) + self.W_dec(hidden).unsqueeze(0))
        # energy = [src len, batch, attn_dim]
        scores = self.v(energy).squeeze(2)
        # scores = [src len, batch]

        if src_mask is not None:
            scores = scores.masked_fill(src_mask == 0, -1e9)

        alpha = F.softmax(scores, dim=1)

        context = torch.einsum('sb,sbh->bh', alpha, encoder_outputs)
        # context = [batch, enc_hid_dim]
        return context, alpha.t()
