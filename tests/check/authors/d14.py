import torch
import torch.nn as nn
import torch.nn.functional as F


def prefix_lm_bias(prefix_len, total, dtype):
    """log of the 0/1 visibility: 0 where visible, -inf elsewhere. [B, 1, N, N]"""
    i = torch.arange(total, device=prefix_len.device)
    in_prefix = i[None, None, :] < prefix_len[:, None, None]
    visible = in_prefix | (i[None, None, :] <= i[None, :, None])
    return visible.to(dtype).log().unsqueeze(1)


class PrefixMQA(nn.Module):
    """Multi-query attention, one shared key/value head.

    All positions read the whole prefix; past the prefix things are causal.
    The positions inside the prefix read each other both ways and cannot
    read what follows.
    """

    def __init__(self, d, n_head, value_mult=2):
        super().__init__()
        self.n_head = n_head
        self.d_head = d // n_head
        self.d_value = self.d_head * value_mult
        # queries first, then the one key, then the one (wider) value
        self.fused = nn.Linear(d, d + self.d_head + self.d_value, bias=False)
        self.back = nn.Linear(n_head * self.d_value, d, bias=False)
        nn.init.zeros_(self.back.weight)

    def forward(self, x, prefix_len):
        B, N, D = x.shape
        q, k, v = self.fused(x).split([D, self.d_head, self.d_value], dim=-1)
        # fold the heads into the query length: [B, 1, H * N, d_head]
        q = q.view(B, N, self.n_head, self.d_head).transpose(1, 2).reshape(B, 1, -1, self.d_head)
        bias = prefix_lm_bias(prefix_len, N, x.dtype).repeat(1, 1, self.n_head, 1)
        y = F.scaled_dot_product_attention(q, k.unsqueeze(1), v.unsqueeze(1), attn_mask=bias)
        y = y.view(B, self.n_head, N, self.d_value).transpose(1, 2).reshape(B, N, -1)
        return x + self.back(y)


if __name__ == "__main__":
    m = PrefixMQA(64, 4)
    print(m(torch.randn(3, 15, 64), torch.tensor([5, 0, 9])).shape)
