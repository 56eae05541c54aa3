from typing import Optional

import torch
from torch import nn


class ImageToTextCrossAttention(nn.Module):
    """Image tokens (queries) read from the tokens of a caption (keys, values).

    image:          [batch, num_patches, image_dim]
    text:           [batch, text_len, text_dim]
    attention_mask: [batch, text_len] from the tokenizer, 1 for a real token and
                    0 for a padding token
    """

    NEG = -10000.0

    def __init__(self, image_dim: int, text_dim: int, num_heads: int = 8, head_dim: int = 32):
        super().__init__()
        inner = num_heads * head_dim
        self.num_heads = num_heads
        self.head_dim = head_dim
        self.norm_image = nn.LayerNorm(image_dim)
        self.norm_text = nn.LayerNorm(text_dim)
        self.q_proj = nn.Linear(image_dim, inner, bias=False)
        self.k_proj = nn.Linear(text_dim, inner, bias=False)
        self.v_proj = nn.Linear(text_dim, inner, bias=False)
        self.o_proj = nn.Linear(inner, image_dim)
        self.gate = nn.Parameter(torch.tensor(0.1))

    def extend_mask(self, attention_mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        mask = attention_mask[:, None, None, :].to(dtype)
        return mask * self.NEG

    def split(self, t: torch.Tensor) -> torch.Tensor:
        b, n, _ = t.shape
        return t.view(b, n, self.num_heads, self.head_dim).permute(0, 2, 1, 3)

    def forward(
        self,
        image: torch.Tensor,
        text: torch.Tensor,
        attention_mask: Optional[torch.Tensor] = None,
    ) -> torch.Tensor:
        text = self.norm_text(text)
        q = self.split(self.q_proj(self.norm_image(image)))
        k = self.split(self.k_proj(text))
        v = self.split(self.v_proj(text))

        scores = torch.matmul(q, k.transpose(2, 3)) * self.head_dim ** -0.5
        if attention_mask is not None:
            scores = scores + self.extend_mask(attention_mask, scores.dtype)
        probs = nn.functional.softmax(scores, dim=-1)

        context = torch.matmul(probs, v).permute(0, 2, 1, 3).flatten(2)
        return image + torch.tanh(self.gate) * self.o_proj(context)


if __name__ == "__main__":
    layer = ImageToTextCrossAttention(64, 48, num_heads=4, head_dim=16)
    img, txt = torch.randn(2, 49, 64), torch.randn(2, 12, 48)
    am = torch.ones(2, 12, dtype=torch.long)
    am[1, 7:] = 0
    print(layer(img, txt, am).shape)
