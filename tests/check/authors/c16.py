import torch
import torch.nn as nn
from einops import rearrange, reduce


class PatchSeriesAttention(nn.Module):
    """Channel-independent patch attention for multivariate series.

    series : [B, L, C]   values
    valid  : [B, L]      True where the values were observed (short series are
                         padded at the end)

    Returns patch states, [B, C, P, d_model]. A patch is valid if any of its
    steps is; patches that are not valid must not be read by the others.
    """

    def __init__(self, patch=16, stride=8, d_model=64, n_heads=4, max_patches=128):
        super().__init__()
        self.patch, self.stride, self.n_heads = patch, stride, n_heads
        self.embed = nn.Linear(patch, d_model)
        self.pos = nn.Parameter(0.02 * torch.randn(max_patches, d_model))
        self.norm = nn.LayerNorm(d_model)
        self.to_qkv = nn.Linear(d_model, 3 * d_model, bias=False)
        self.to_out = nn.Linear(d_model, d_model)

    def patchify(self, series, valid):
        x = rearrange(series, "b l c -> b c l").unfold(-1, self.patch, self.stride)
        ok = valid.unfold(-1, self.patch, self.stride).any(-1)
        return x, ok

    def forward(self, series, valid=None):
        b, l, c = series.shape
        if valid is None:
            valid = torch.ones(b, l, dtype=torch.bool, device=series.device)
        series = series * valid.unsqueeze(-1)
        x, ok = self.patchify(series, valid)

        x = self.embed(x) + self.pos[: x.shape[2]]
        x = rearrange(x, "b c p d -> (b c) p d")
        ok = ok.repeat_interleave(c, dim=0)

        q, k, v = rearrange(self.to_qkv(self.norm(x)), "s p (three h d) -> three s h p d", three=3, h=self.n_heads)
        scores = torch.einsum("shid,shjd->shij", q, k) / q.shape[-1] ** 0.5
        scores = scores.masked_fill(~ok[:, None, :, None], -1e9)
        w = scores.softmax(dim=-1)
        y = rearrange(torch.einsum("shij,shjd->shid", w, v), "s h p d -> s p (h d)")

        x = x + self.to_out(y)
        return rearrange(x, "(b c) p d -> b c p d", b=b)


if __name__ == "__main__":
    m = PatchSeriesAttention()
    v = torch.ones(2, 96, dtype=torch.bool)
    v[1, 50:] = False
    print(m(torch.randn(2, 96, 7), v).shape)
