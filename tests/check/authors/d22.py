"""Gated cross-attention from text to image tokens."""
import torch
from torch import nn


class MediaGate(nn.Module):
    def __init__(self, text_dim, media_dim, heads=8, head_dim=32, ff_mult=2):
        super().__init__()
        inner = heads * head_dim
        self.heads, self.head_dim = heads, head_dim
        self.text_norm = nn.LayerNorm(text_dim)
        self.media_norm = nn.LayerNorm(media_dim)
        self.to_q = nn.Linear(text_dim, inner, bias=False)
        self.to_kv = nn.Linear(media_dim, 2 * inner, bias=False)
        self.to_out = nn.Linear(inner, text_dim, bias=False)
        # both gates start shut: a fresh block is the identity
        self.attn_gate = nn.Parameter(torch.zeros(1))
        self.ff_gate = nn.Parameter(torch.zeros(1))
        self.ff = nn.Sequential(
            nn.LayerNorm(text_dim),
            nn.Linear(text_dim, ff_mult * text_dim),
            nn.GELU(),
            nn.Linear(ff_mult * text_dim, text_dim),
        )

    def attend(self, text, media, may_look):
        b, t, _ = text.shape
        q = self.to_q(self.text_norm(text)).view(b, t, self.heads, self.head_dim)
        k, v = self.to_kv(self.media_norm(media)).chunk(2, dim=-1)
        k = k.unflatten(-1, (self.heads, self.head_dim))
        v = v.unflatten(-1, (self.heads, self.head_dim))
        sim = torch.einsum("bthd,bshd->bhts", q, k) * self.head_dim ** -0.5
        if may_look is not None:
            sim = sim.masked_fill(~may_look, torch.finfo(sim.dtype).min)
        w = sim.softmax(dim=-1)
        if may_look is not None:
            # text before the first picture has nothing to look at: give it nothing
            w = w * may_look.any(dim=-1, keepdim=True)
        y = torch.einsum("bhts,bshd->bthd", w, v)
        return self.to_out(y.flatten(2))

    def forward(self, text, media, may_look=None):
        """may_look: bool [B, 1, T, S], True where text t may look at media s."""
        text = text + self.attn_gate.tanh() * self.attend(text, media, may_look)
        text = text + self.ff_gate.tanh() * self.ff(text)
        return text


def look_at_last_image(image_starts, n_images, per_image):
    """image_starts: bool [B, T], True on <image> tokens. Text reads only the
    latest image that began at or before it."""
    count = image_starts.long().cumsum(dim=1)
    which = torch.arange(1, n_images + 1, device=count.device).repeat_interleave(per_image)
    return (count[:, :, None] == which).unsqueeze(1)


if __name__ == "__main__":
    starts = torch.zeros(2, 12, dtype=torch.bool)
    starts[0, 2] = starts[0, 7] = starts[1, 0] = True
    mask = look_at_last_image(starts, n_images=2, per_image=5)
    blk = MediaGate(64, 48, heads=4)
    print(blk(torch.randn(2, 12, 64), torch.randn(2, 10, 48), mask).shape)
