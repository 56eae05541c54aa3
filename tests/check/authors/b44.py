import torch
import torch.nn as nn
import torch.nn.functional as F


class NextItemAttention(nn.Module):
    """SASRec-like block. Histories are left-padded with item 0.

    A padded position may look at itself so that no row of the mask is empty;
    padded outputs are zeroed at the end.
    """

    def __init__(self, hidden, heads=2, p=0.2):
        super().__init__()
        self.heads, self.p = heads, p
        self.ln = nn.LayerNorm(hidden)
        self.q = nn.Linear(hidden, hidden)
        self.kv = nn.Linear(hidden, hidden * 2)
        self.o = nn.Linear(hidden, hidden)

    def forward(self, emb, items):
        B, L, D = emb.shape
        real = items.ne(0)
        pos = torch.arange(L, device=emb.device)
        past = pos.view(-1, 1) >= pos.view(1, -1)
        itself = pos.view(-1, 1) == pos.view(1, -1)
        see = (past & real.unsqueeze(1)) | itself          # B L L

        h = self.ln(emb)
        q = self.q(h).view(B, L, self.heads, -1).transpose(1, 2)
        k, v = self.kv(h).view(B, L, 2, self.heads, -1).unbind(2)
        y = F.scaled_dot_product_attention(
            q, k.transpose(1, 2), v.transpose(1, 2),
            attn_mask=see.unsqueeze(1), dropout_p=self.training * self.p)
        y = self.o(y.transpose(1, 2).reshape(B, L, D))
        return (emb + F.dropout(y, self.p, self.training)) * real.unsqueeze(-1)
