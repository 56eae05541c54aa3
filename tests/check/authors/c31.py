import torch
import torch.nn as nn


class UNetAttention(nn.Module):
    """Multi-head attention for a U-Net stage, conditioned on the noise level.

    h    : [B, C, H, W]
    temb : [B, E]   embedding of the time step; gives a scale and a shift
                    after the group norm
    """

    def __init__(self, channels, emb_dim, head_channels=32, groups=8):
        super().__init__()
        assert channels % head_channels == 0
        self.n_heads = channels // head_channels
        self.head_channels = head_channels
        self.norm = nn.GroupNorm(groups, channels, affine=False)
        self.film = nn.Sequential(nn.SiLU(), nn.Linear(emb_dim, 2 * channels))
        self.qkv = nn.Conv1d(channels, 3 * channels, 1)
        self.out = nn.Conv1d(channels, channels, 1)
        nn.init.normal_(self.out.weight, std=1e-2)
        nn.init.zeros_(self.out.bias)

    def modulate(self, h, temb):
        scale, shift = self.film(temb)[:, :, None, None].chunk(2, dim=1)
        return self.norm(h) * (1 + scale) + shift

    def forward(self, h, temb):
        B, C, H, W = h.shape
        x = self.modulate(h, temb).flatten(2)
        q, k, v = self.qkv(x).view(B, 3, self.n_heads, self.head_channels, H * W).unbind(1)

        # split the scale over both sides, safer in half precision
        s = self.head_channels ** -0.25
        weight = torch.einsum("bhcq,bhck->bqkh", q * s, k * s)
        weight = weight.float().softmax(dim=-1).to(v.dtype)
        x = torch.einsum("bqkh,bhck->bhcq", weight, v)

        x = self.out(x.reshape(B, C, H * W))
        return h + x.view(B, C, H, W)


if __name__ == "__main__":
    m = UNetAttention(64, 128, head_channels=16)
    out = m(torch.randn(2, 64, 8, 8), torch.randn(2, 128))
    print(out.shape)
