"""Attention over packed rows: several documents share one row of tokens."""
import torch
from einops import rearrange
from torch import nn
import torch.nn.functional as F


class PackedMixedAttention(nn.Module):
    """Some heads are local, the others see the whole document.

    doc_ids [B, T] numbers the document that each token came from. Tokens never
    see other documents.
    """

    def __init__(self, dim: int, n_local: int, n_full: int, window: int = 32, p: float = 0.0):
        super().__init__()
        self.n_local, self.n_full = n_local, n_full
        self.heads = n_local + n_full
        assert dim % self.heads == 0
        self.window = window
        self.p = p
        self.norm = nn.LayerNorm(dim, bias=False)
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)

    def masks(self, doc_ids):
        T = doc_ids.shape[1]
        pos = torch.arange(T, device=doc_ids.device)
        back = pos[:, None] - pos[None, :]
        causal = back >= 0
        same_doc = doc_ids[:, :, None] == doc_ids[:, None, :]
        full = (causal & same_doc)[:, None]
        local = (causal & (back < self.window))[None, None]
        return torch.cat(
            [
                local.expand(full.shape[0], self.n_local, T, T),
                full.expand(-1, self.n_full, -1, -1),
            ],
            dim=1,
        )

    def forward(self, x, doc_ids):
        q, k, v = rearrange(
            self.qkv(self.norm(x)), "b t (n h d) -> n b h t d", n=3, h=self.heads
        ).unbind(0)
        y = F.scaled_dot_product_attention(
            q, k, v,
            attn_mask=self.masks(doc_ids),
            dropout_p=self.p if self.training else 0.0,
        )
        return x + self.out(rearrange(y, "b h t d -> b t (h d)"))


if __name__ == "__main__":
    torch.manual_seed(1)
    layer = PackedMixedAttention(96, n_local=2, n_full=4, window=8)
    ids = torch.tensor([[0] * 10 + [1] * 14 + [2] * 6, [0] * 25 + [1] * 5])
    print(layer(torch.randn(2, 30, 96), ids).shape)
