"""The sizes and options of a GPT-2, read from and written to Hugging Face's `config.json`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..core.numbers import whole
from ..weights.hf_folder import CONFIG, FolderError


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def _quick_gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu_new": _gelu_tanh,
    "gelu_pytorch_tanh": _gelu_tanh,
    "gelu_fast": _gelu_tanh,
    "gelu": F.gelu,
    "quick_gelu": _quick_gelu,
    "relu": F.relu,
    "silu": F.silu,
    "swish": F.silu,
    "tanh": torch.tanh,
}

# Keys of a GPT-2 config that change the function and that we do not offer, with the values that
# leave it as it is. (`reorder_and_upcast_attn` changes only rounding: scores are summed in
# float32 here in any case.)
_MUST_BE: dict[str, tuple[object, ...]] = {
    "add_cross_attention": (False, None),
    "quantization_config": (None,),
    "pruned_heads": ({}, None),
}


@dataclass(frozen=True)
class GPTConfig:
    """The sizes of a GPT-2, named and defaulted as in Hugging Face's `config.json`.

    Raises:
        ValueError: sizes that do not fit each other, or an activation that is not offered.

    >>> GPTConfig(n_embd=12, n_head=3).inner
    48
    """

    vocab_size: int = 50257
    n_positions: int = 1024
    n_embd: int = 768
    n_layer: int = 12
    n_head: int = 12
    n_inner: int | None = None
    activation_function: str = "gelu_new"
    resid_pdrop: float = 0.1
    embd_pdrop: float = 0.1
    attn_pdrop: float = 0.1
    layer_norm_epsilon: float = 1e-5
    initializer_range: float = 0.02
    scale_attn_weights: bool = True
    scale_attn_by_inverse_layer_idx: bool = False
    tie_word_embeddings: bool = True
    bos_token_id: int | None = None
    eos_token_id: int | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            typed(field.name, getattr(self, field.name), field.default)
        for name in ("vocab_size", "n_positions", "n_embd", "n_layer", "n_head", "inner"):
            if (size := getattr(self, name)) < 1:
                raise ValueError(f"{name.replace('inner', 'n_inner')}={size}: must be at least 1")
        if self.n_embd % self.n_head:
            raise ValueError(
                f"n_embd={self.n_embd} does not divide into n_head={self.n_head} heads"
            )
        for name in ("resid_pdrop", "embd_pdrop", "attn_pdrop"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: must be at least 0 and below 1")
        for name in ("layer_norm_epsilon", "initializer_range"):
            if not 0 < getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: must be between 0 and 1")
        if self.activation_function not in ACTIVATIONS:
            raise ValueError(
                f"activation_function={self.activation_function!r} is not offered; "
                f"one of {', '.join(ACTIVATIONS)} is"
            )

    @property
    def inner(self) -> int:
        """Width of the feed-forward part."""
        return 4 * self.n_embd if self.n_inner is None else self.n_inner

    @property
    def weights(self) -> int:
        """How many numbers the model has; a tied head counts once."""
        e, inner = self.n_embd, self.inner
        block = 4 * e + (4 * e * e + 4 * e) + (2 * e * inner + inner + e)
        head = 0 if self.tie_word_embeddings else self.vocab_size * e
        return (self.vocab_size + self.n_positions) * e + self.n_layer * block + 2 * e + head

    @classmethod
    def from_json(cls, config: dict[str, Any], where: str = CONFIG) -> GPTConfig:
        """Read a Hugging Face config; keys that do not change the function are passed over.

        Raises:
            FolderError: another architecture, or something that is not offered, named.
        """
        kind = config.get("model_type")
        if kind != "gpt2":
            raise FolderError(f"{where}: model_type is {kind!r}, and only 'gpt2' can be read")
        for key, harmless in _MUST_BE.items():
            if key in config and config[key] not in harmless:
                raise FolderError(f"{where}: {key}={config[key]!r} is not supported")
        try:
            known = {
                field.name: typed(field.name, config[field.name], field.default)
                for field in fields(cls)
                if field.name in config
            }
            return cls(**known)
        except ValueError as error:
            raise FolderError(f"{where}: {error}") from None

    def to_json(self) -> dict[str, Any]:
        """The config as Hugging Face writes it."""
        return {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", **asdict(self)}


def typed(name: str, value: Any, default: Any) -> Any:
    """A value of a config as its field wants it; JSON says 0 where a float is meant."""
    number = whole(value) is not None
    if isinstance(default, bool):
        fits = isinstance(value, bool)
    elif isinstance(default, float):
        fits, value = number or isinstance(value, float), float(value) if number else value
    elif isinstance(default, str):
        fits = isinstance(value, str)
    else:
        fits = number or (value is None and default is None)
    if not fits:
        kind = type(default).__name__ if isinstance(default, bool | float | str) else "whole number"
        raise ValueError(f"{name}={value!r}: not a {kind}")
    return value
