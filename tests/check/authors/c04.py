import torch
import torch.nn.functional as F
from torch import Tensor, nn


def relative_lookup(win: int) -> Tensor:
    """For each (query, key) pair of a win x win window, the row of the bias
    table that belongs to their offset."""
    pos = torch.arange(win * win)
    y = torch.div(pos, win, rounding_mode="floor")
    x = pos % win
    dy = y.unsqueeze(1) - y.unsqueeze(0) + win - 1
    dx = x.unsqueeze(1) - x.unsqueeze(0) + win - 1
    return dy * win + dx


class RelPosWindowAttention(nn.Module):
    """Window attention with one learnt bias for each 2-d offset and head.

    Takes windows that were cut out already, [num_windows * B, win * win, dim],
    and an optional mask [num_windows, win * win, win * win] that is added to
    the scores.
    """

    lookup: Tensor

    def __init__(self, dim: int, win: int = 7, num_heads: int = 4, attn_drop: float = 0.0) -> None:
        super().__init__()
        if dim % num_heads:
            raise ValueError("dim must be a multiple of num_heads")
        self.num_heads = num_heads
        self.win = win
        self.attn_drop = attn_drop
        self.to_q = nn.Linear(dim, dim)
        self.to_kv = nn.Linear(dim, 2 * dim)
        self.to_out = nn.Linear(dim, dim)
        self.bias_table = nn.Parameter(torch.empty((2 * win - 1) * (2 * win - 1), num_heads))
        nn.init.normal_(self.bias_table, std=0.02)
        self.register_buffer("lookup", relative_lookup(win))

    def _heads(self, t: Tensor) -> Tensor:
        return t.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)

    def forward(self, windows: Tensor, mask: Tensor | None = None) -> Tensor:
        bw, n, dim = windows.shape
        assert n == self.win ** 2
        q = self._heads(self.to_q(windows))
        k, v = (self._heads(t) for t in self.to_kv(windows).chunk(2, dim=-1))

        bias = self.bias_table[self.lookup]            # n, n, heads
        bias = bias.permute(2, 0, 1).unsqueeze(0)      # 1, heads, n, n
        if mask is not None:
            nw = mask.shape[0]
            bias = bias + mask.unsqueeze(1).repeat(bw // nw, 1, 1, 1)
        bias = bias.expand(bw, -1, -1, -1)

        drop = self.attn_drop if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, dropout_p=drop)
        return self.to_out(y.transpose(1, 2).flatten(2))


if __name__ == "__main__":
    att = RelPosWindowAttention(64, win=7, num_heads=4)
    w = torch.randn(8, 49, 64)
    m = torch.zeros(4, 49, 49)
    m[3, :, 25:] = -100.0
    print(att(w).shape, att(w, m).shape)
