from typing import Optional

import torch
from torch import Tensor, nn


def lengths_to_mask(lengths: Tensor, max_len: Optional[int] = None) -> Tensor:
    """(B,) frame counts -> (B, T) bool, True on valid frames."""
    max_len = int(lengths.max()) if max_len is None else max_len
    steps = torch.arange(max_len, device=lengths.device)
    return steps.unsqueeze(0) < lengths.unsqueeze(1)


class ConformerMHSA(nn.Module):
    """Multi-headed self-attention module of the Conformer encoder (no rel. pos.).

    Input is time-first, (T, B, D), like the rest of our recipes.
    """

    def __init__(self, d_model: int, n_heads: int, p_drop: float = 0.1) -> None:
        super().__init__()
        self.layer_norm = nn.LayerNorm(d_model)
        self.mha = nn.MultiheadAttention(d_model, n_heads, dropout=p_drop)
        self.dropout = nn.Dropout(p_drop)

    def forward(self, feats: Tensor, frame_mask: Optional[Tensor] = None) -> Tensor:
        y = self.layer_norm(feats)
        y, _ = self.mha(y, y, y, key_padding_mask=frame_mask, need_weights=False)
        return feats + self.dropout(y)


class SpeechEncoder(nn.Module):
    def __init__(self, n_mels: int = 80, d_model: int = 144, n_heads: int = 4, n_layers: int = 4) -> None:
        super().__init__()
        self.inp = nn.Linear(n_mels, d_model)
        self.att = nn.ModuleList([ConformerMHSA(d_model, n_heads) for _ in range(n_layers)])
        self.ff = nn.ModuleList(
            [
                nn.Sequential(
                    nn.LayerNorm(d_model),
                    nn.Linear(d_model, 4 * d_model),
                    nn.SiLU(),
                    nn.Linear(4 * d_model, d_model),
                )
                for _ in range(n_layers)
            ]
        )
        self.out_norm = nn.LayerNorm(d_model)

    def forward(self, fbank: Tensor, lengths: Tensor) -> Tensor:
        # fbank: (B, T, n_mels)
        frame_mask = lengths_to_mask(lengths, fbank.size(1))
        h = self.inp(fbank).transpose(0, 1)  # (T, B, D)
        for att, ff in zip(self.att, self.ff):
            h = att(h, frame_mask)
            h = h + ff(h)
        return self.out_norm(h).transpose(0, 1)
