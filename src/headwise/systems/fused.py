"""Rung 5: q, k and v from one matrix, as GPT-2 stores it.

`GPT2MultiHeadAttention` uses names from Modular's book "Build an LLM from scratch in MAX" (the
book's own class is in `max_gpt2.py`) and weight names from Hugging Face, whose GPT-2 layers load
without conversion. One bug in the book is fixed: its `causal_mask` ignores cached tokens, which
breaks caching; here the mask is aligned to the end.
"""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ._checks import check_dropout, check_heads, check_input, check_sizes


@runtime_checkable
class GPT2Sizes(Protocol):
    """The sizes that the layer reads from a configuration, such as Hugging Face's GPT2Config.

    If present, `n_positions` (the maximum sequence length), `attn_pdrop` and `resid_pdrop` are also
    read.
    """

    n_embd: int
    n_head: int


def causal_mask(
    sequence_length: int,
    num_tokens: int,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
) -> Float[Tensor, "T n"]:
    """Return the mask to add to the scores of queries that follow `num_tokens` cached tokens.

    The mask is aligned to the end: query i is at position `num_tokens + i`, so the last query sees
    the last key.

    Args:
        sequence_length: T, the number of queries.
        num_tokens: P, the number of tokens cached before them.

    Returns:
        `[T, P + T]`: 0 where key j is visible, `j <= P + i`, and −inf elsewhere.

    >>> causal_mask(2, 1)
    tensor([[0., 0., -inf],
            [0., 0., 0.]])
    """
    n = num_tokens + sequence_length
    mask = torch.full((sequence_length, n), -torch.inf, dtype=dtype, device=device)
    return mask.triu(diagonal=num_tokens + 1)


class Conv1D(nn.Module):
    """GPT-2's linear layer: `x W + b` with W `[nx, nf]`, the transpose of `nn.Linear`'s."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(nx, nf))
        self.bias = nn.Parameter(torch.zeros(nf))
        nn.init.normal_(self.weight, std=0.02)

    def forward(self, x: Float[Tensor, "*B nx"]) -> Float[Tensor, "*B nf"]:
        return x @ self.weight + self.bias


class GPT2MultiHeadAttention(nn.Module):
    """Causal self-attention with GPT-2's names: `c_attn` projects to q, k and v, `c_proj` back.

    Args:
        config: has `n_embd`, the width E, and `n_head`, the number of heads H; see `GPT2Sizes`.

    Raises:
        ValueError: n_embd is not a multiple of n_head, a dropout is outside [0, 1), or the config
            requires a variant of GPT-2's scaling that is not supported.

    >>> from types import SimpleNamespace
    >>> layer = GPT2MultiHeadAttention(SimpleNamespace(n_embd=12, n_head=3))
    >>> layer(torch.randn(2, 5, 12)).shape
    torch.Size([2, 5, 12])
    """

    def __init__(self, config: GPT2Sizes) -> None:
        super().__init__()
        check_sizes("GPT2MultiHeadAttention", n_embd=config.n_embd, n_head=config.n_head)
        check_heads("GPT2MultiHeadAttention", "n_embd", config.n_embd, "n_head", config.n_head)
        check_variant(config)
        self.embed_dim = config.n_embd
        self.num_heads = config.n_head
        self.head_dim = self.embed_dim // self.num_heads
        self.split_size = self.embed_dim
        self.n_positions: int | None = getattr(config, "n_positions", None)
        self.c_attn = Conv1D(3 * self.embed_dim, self.embed_dim)
        self.c_proj = Conv1D(self.embed_dim, self.embed_dim)
        self.attn_dropout = nn.Dropout(_probability(config, "attn_pdrop"))
        self.resid_dropout = nn.Dropout(_probability(config, "resid_pdrop"))
        self.register_load_state_dict_pre_hook(_leave_out_masks)

    def forward(self, hidden_states: Float[Tensor, "B T E"]) -> Float[Tensor, "B T E"]:
        """Attend from every position to itself and to earlier positions."""
        check_input(self, hidden_states, self.embed_dim, self.n_positions)
        query, key, value = self._project(hidden_states)
        return self._output(self._attn(query, key, value))

    def attend_cached(
        self,
        hidden_states: Float[Tensor, "B T E"],
        past_key: Float[Tensor, "B H P D"],
        past_value: Float[Tensor, "B H P D"],
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Continue a text whose keys and values are cached.

        Args:
            hidden_states: the next tokens `[B, T, E]`.
            past_key: the keys `[B, H, P, D]` of the tokens before them; P may be 0.
            past_value: their values, of the same shape.

        Returns:
            The output `[B, T, E]`, and key and value `[B, H, P + T, D]` for the next call.

        Raises:
            ValueError: the width or the past does not fit, or the text exceeds `n_positions`.
        """
        self._check_past(hidden_states, past_key, past_value)
        query, key, value = self._project(hidden_states)
        key = torch.cat([past_key, key], dim=-2)
        value = torch.cat([past_value, value], dim=-2)
        return self._output(self._attn(query, key, value)), key, value

    def _project(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Project `[B, T, E]` to q, k and v `[B, H, T, D]`."""
        query, key, value = (
            self._split_heads(part, self.num_heads, self.head_dim)
            for part in self.c_attn(hidden_states).split(self.split_size, dim=-1)
        )
        return query, key, value

    def _attn(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attend from the last T positions `[B, H, T, D]` to all P + T `[B, H, P + T, D]`."""
        attn_weights = query @ key.transpose(-1, -2) / value.shape[-1] ** 0.5
        T, n = attn_weights.shape[-2:]
        mask = causal_mask(T, n - T, dtype=query.dtype, device=query.device)
        attn_weights = torch.softmax(attn_weights + mask, dim=-1)
        return self.attn_dropout(attn_weights) @ value

    def _output(self, attn_output: Tensor) -> Tensor:
        """Project `[B, H, T, D]` to `[B, T, E]`."""
        merged = self._merge_heads(attn_output, self.num_heads, self.head_dim)
        return self.resid_dropout(self.c_proj(merged))

    def _split_heads(self, tensor: Tensor, num_heads: int, attn_head_size: int) -> Tensor:
        """Split `[B, T, H * D]` into `[B, H, T, D]`."""
        return tensor.unflatten(-1, (num_heads, attn_head_size)).transpose(-3, -2)

    def _merge_heads(self, tensor: Tensor, num_heads: int, attn_head_size: int) -> Tensor:
        """Merge `[B, H, T, D]` into `[B, T, H * D]`."""
        tensor = tensor.transpose(-3, -2)
        return tensor.reshape(*tensor.shape[:-2], num_heads * attn_head_size)

    def _check_past(self, hidden_states: Tensor, past_key: Tensor, past_value: Tensor) -> None:
        check_input(self, hidden_states, self.embed_dim)
        B, T, _ = hidden_states.shape
        H, D, shape = self.num_heads, self.head_dim, past_key.shape
        call = f"attend_cached({[B, T, self.embed_dim]}, {list(shape)}, {list(past_value.shape)})"
        fits = past_key.ndim == 4 and (shape[0], shape[1], shape[3]) == (B, H, D)
        if not fits or shape != past_value.shape:
            raise ValueError(f"{call}: past_key and past_value must be [{B}, {H}, P, {D}]")
        if self.n_positions is not None and shape[2] + T > self.n_positions:
            raise ValueError(
                f"{call}: {shape[2]} cached and {T} new tokens do not fit the context of "
                f"{self.n_positions}"
            )


def _probability(config: GPT2Sizes, name: str) -> float:
    value = getattr(config, name, 0.0)
    check_dropout("GPT2MultiHeadAttention", value, name)
    return value


def check_variant(config: GPT2Sizes) -> None:
    """Raise ValueError for variants that Hugging Face's layer computes differently."""
    for name, usual in (("scale_attn_weights", True), ("scale_attn_by_inverse_layer_idx", False)):
        if getattr(config, name, usual) != usual:
            raise ValueError(
                f"GPT2MultiHeadAttention({name}={not usual}): scores are always divided only by "
                f"the root of the head dimension; {name} must be {usual}"
            )


def _leave_out_masks(_: nn.Module, state: dict[str, Any], prefix: str, *rest: Any) -> None:
    """Remove the mask buffers `bias` and `masked_bias` of old GPT-2 files."""
    for name in ("bias", "masked_bias"):
        state.pop(f"{prefix}{name}", None)
