"""GPT-2 built on `MultiHeadAttention`, with Hugging Face's names.

A small model to train, load and inspect. `GPT.from_pretrained` reads a Hugging Face folder, and
`save_pretrained` writes one that `transformers` can read. Source: Radford et al. 2019.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from .._text import and_more
from ..core.mask_algebra import Mask
from ..core.masks import Causal
from ..core.numbers import as_int, format_value
from ..layers.attention import MultiHeadAttention
from ..layers.kv_cache import KVCache
from ..weights.folders import (
    CONFIG,
    FolderError,
    StoredTensor,
    check_size,
    check_values,
    read_config,
    read_headers,
    read_tokenizer,
    weight_files,
    write_folder,
)

if TYPE_CHECKING:
    from tokenizers import Tokenizer

__all__ = ["GPT", "FolderError", "GPT2Attention", "GPTConfig", "load"]

# ── configuration ───────────────────────────────────────────────────────────────────────────────


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu_new": _gelu_tanh,
    "gelu_pytorch_tanh": _gelu_tanh,
    "gelu_fast": _gelu_tanh,
    "gelu": F.gelu,
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": F.relu,
    "silu": F.silu,
    "swish": F.silu,
    "tanh": torch.tanh,
}

_MUST_BE: dict[str, tuple[object, ...]] = {
    "add_cross_attention": (False, None),
    "quantization_config": (None,),
    "pruned_heads": ({}, None),
}
"""Unsupported keys of a GPT-2 config, with the values that have no effect.

`reorder_and_upcast_attn` changes only rounding: here, scores are always summed in float32.
"""


@dataclass(frozen=True)
class GPTConfig:
    """The sizes of a GPT-2, with the names and defaults of Hugging Face's `config.json`.

    Raises:
        ValueError: the sizes are inconsistent, or the activation is not supported.

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
        check_types(self)
        for name in ("vocab_size", "n_positions", "n_embd", "n_layer", "n_head", "inner"):
            if (size := getattr(self, name)) < 1:
                name = name.replace("inner", "n_inner")
                raise ValueError(f"{name} must be at least 1, got {size}")
        if self.n_embd % self.n_head:
            raise ValueError(
                f"n_embd must be a multiple of n_head={self.n_head}, got {self.n_embd}"
            )
        for name in ("resid_pdrop", "embd_pdrop", "attn_pdrop"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} must be in [0, 1), got {getattr(self, name)}")
        for name in ("layer_norm_epsilon", "initializer_range"):
            if not 0 < getattr(self, name) < 1:
                raise ValueError(f"{name} must be between 0 and 1, got {getattr(self, name)}")
        if self.activation_function not in ACTIVATIONS:
            raise ValueError(
                f"activation_function must be one of {', '.join(ACTIVATIONS)}, "
                f"got {self.activation_function!r}"
            )

    @property
    def inner(self) -> int:
        """The width of the feed-forward part."""
        return 4 * self.n_embd if self.n_inner is None else self.n_inner

    @property
    def weights(self) -> int:
        """The number of parameters; a tied head is counted once."""
        e, inner = self.n_embd, self.inner
        block = 4 * e + (4 * e * e + 4 * e) + (2 * e * inner + inner + e)
        head = 0 if self.tie_word_embeddings else self.vocab_size * e
        return (self.vocab_size + self.n_positions) * e + self.n_layer * block + 2 * e + head

    @classmethod
    def from_json(cls, config: dict[str, Any], where: str = CONFIG) -> GPTConfig:
        """Read a Hugging Face config; keys that do not affect the model's output are ignored.

        Raises:
            FolderError: the architecture or an option is not supported.
        """
        kind = config.get("model_type")
        if kind != "gpt2":
            raise FolderError(f"{where}: model_type must be 'gpt2', got {kind!r}")
        for key, harmless in _MUST_BE.items():
            if key in config and config[key] not in harmless:
                raise FolderError(f"{where}: {key}={config[key]!r} is not supported")
        try:
            return cls(**{f.name: config[f.name] for f in fields(cls) if f.name in config})
        except ValueError as error:
            raise FolderError(f"{where}: {error}") from None

    def to_json(self) -> dict[str, Any]:
        """Return the config in Hugging Face's format."""
        return {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", **asdict(self)}


def check_types(config: Any) -> None:
    """Check a frozen dataclass's fields by the types of their defaults; convert integers to floats.

    Raises:
        ValueError: a value has the wrong type.
    """
    for field in fields(config):
        name, default, value = field.name, field.default, getattr(config, field.name)
        number = as_int(value) is not None
        if isinstance(default, bool | str):
            fits, kind = isinstance(value, type(default)), type(default).__name__
        elif isinstance(default, float):
            fits, kind = number or isinstance(value, float), "float"
            if number:  # JSON may contain 0 for 0.0
                object.__setattr__(config, name, float(value))
        elif default is None or as_int(default) is not None:
            fits, kind = number or (value is None and default is None), "whole number"
        else:
            continue
        if not fits:
            raise ValueError(f"{name} must be a {kind}, got {value!r}")


# ── the model ───────────────────────────────────────────────────────────────────────────────────


class Conv1D(nn.Module):
    """`nn.Linear` with its weight in GPT-2's orientation, `[in, out]`."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(in_features, out_features))
        self.bias = nn.Parameter(torch.empty(out_features))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialize weights with standard deviation 0.02, and biases with 0."""
        nn.init.normal_(self.weight, std=0.02)
        nn.init.zeros_(self.bias)

    def forward(self, x: Float[Tensor, "... I"]) -> Float[Tensor, "... O"]:
        return F.linear(x, self.weight.t(), self.bias)


class GPT2Attention(MultiHeadAttention):
    """`MultiHeadAttention` with GPT-2's parts: one `c_attn` for q, k and v, and `c_proj`."""

    def __init__(self, config: GPTConfig, layer: int) -> None:
        scale = (config.n_embd // config.n_head) ** -0.5 if config.scale_attn_weights else 1.0
        if config.scale_attn_by_inverse_layer_idx:
            scale /= layer + 1
        super().__init__(config.n_embd, config.n_head, dropout=config.attn_pdrop, scale=scale)
        self.resid_dropout = nn.Dropout(config.resid_pdrop)

    def _build(self, **factory: Any) -> None:
        self.c_attn = Conv1D(self.embed_dim, 3 * self.embed_dim).to(**factory)
        self.c_proj = Conv1D(self.embed_dim, self.embed_dim).to(**factory)

    def reset_parameters(self) -> None:
        self.c_attn.reset_parameters()
        self.c_proj.reset_parameters()

    def _project(self, x: Tensor, context: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        if context is not None:
            raise ValueError("GPT2Attention is self-attention; it does not take a context")
        q, k, v = self.c_attn(x).split(self.num_heads * self.head_dim, dim=-1)
        return self._heads(q), self._heads(k), self._heads(v)

    @property
    def projection(self) -> Tensor:
        return self._here(self.c_proj.weight).t()

    def _merge(self, out: Tensor) -> Tensor:
        return self.resid_dropout(self.c_proj(out.transpose(1, 2).flatten(2)))


class MLP(nn.Module):
    """GPT-2's feed-forward part."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.c_fc = Conv1D(config.n_embd, config.inner)
        self.c_proj = Conv1D(config.inner, config.n_embd)
        self.act = ACTIVATIONS[config.activation_function]
        self.dropout = nn.Dropout(config.resid_pdrop)

    def forward(self, x: Float[Tensor, "B T E"]) -> Float[Tensor, "B T E"]:
        return self.dropout(self.c_proj(self.act(self.c_fc(x))))


class GPT2Block(nn.Module):
    """Attention and feed-forward: each reads a normalized input and adds to the residual stream."""

    def __init__(self, config: GPTConfig, layer: int) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd, eps=config.layer_norm_epsilon)
        self.attn = GPT2Attention(config, layer)
        self.ln_2 = nn.LayerNorm(config.n_embd, eps=config.layer_norm_epsilon)
        self.mlp = MLP(config)

    def forward(
        self, x: Float[Tensor, "B T E"], mask: Mask, cache: KVCache | None = None
    ) -> Float[Tensor, "B T E"]:
        x = x + self.attn(self.ln_1(x), mask=mask, cache=cache)
        return x + self.mlp(self.ln_2(x))


class Transformer(nn.Module):
    """Embeddings, blocks and the final normalization: Hugging Face's `GPT2Model`."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.wpe = nn.Embedding(config.n_positions, config.n_embd)
        self.drop = nn.Dropout(config.embd_pdrop)
        self.h = nn.ModuleList(GPT2Block(config, layer) for layer in range(config.n_layer))
        self.ln_f = nn.LayerNorm(config.n_embd, eps=config.layer_norm_epsilon)

    def forward(
        self,
        ids: Int[Tensor, "B T"],
        positions: Int[Tensor, "*B T"],
        mask: Mask,
        cache: Sequence[KVCache] | None = None,
    ) -> Float[Tensor, "B T E"]:
        x = self.drop(self.wte(ids) + self.wpe(positions))
        for layer, block in enumerate(self.h):
            x = block(x, mask, cache[layer] if cache is not None else None)
        return self.ln_f(x)


class GPT(nn.Module):
    """GPT-2 with its language-modeling head.

    Weights are initialized as in GPT-2: normal with standard deviation `initializer_range`, divided
    by `sqrt(2 · n_layer)` in the projections into the residual stream; biases are 0.

    >>> model = GPT(GPTConfig(vocab_size=11, n_positions=7, n_embd=6, n_layer=1, n_head=3)).eval()
    >>> model(torch.tensor([[1, 2, 3], [4, 5, 6]])).shape
    torch.Size([2, 3, 11])
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.transformer = Transformer(config)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.transformer.wte.weight
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialize the weights again, from the global generator."""
        std = self.config.initializer_range
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                residual = name.endswith("c_proj.weight")
                shrink = math.sqrt(2 * self.config.n_layer) if residual else 1.0
                nn.init.normal_(parameter, std=std / shrink)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)
            else:
                nn.init.ones_(parameter)

    def forward(
        self,
        ids: Int[Tensor, "B T"],
        *,
        cache: Sequence[KVCache] | None = None,
        mask: Mask | None = None,
        positions: Int[Tensor, "*B T"] | None = None,
    ) -> Float[Tensor, "B T V"]:
        """Compute the logits of the next token after each position.

        Args:
            ids: token ids.
            cache: one `KVCache` per layer (`new_cache()`), appended to in place.
            mask: a mask in addition to `Causal()`, for example `Padding(lengths, side="left")`.
            positions: rows of the position table; by default they continue after the cache.

        Raises:
            ValueError: there are more positions than the model has; ids are outside the vocabulary
                (checked only on the CPU, where it is cheap); or the cache has a different number of
                layers.
        """
        return self.lm_head(self._hidden(ids, cache, mask, positions))

    def next_logits(
        self,
        ids: Int[Tensor, "B T"],
        *,
        cache: Sequence[KVCache] | None = None,
        mask: Mask | None = None,
        positions: Int[Tensor, "*B T"] | None = None,
    ) -> Float[Tensor, "B V"]:
        """Return `forward(...)[:, -1]` without applying the head to the other positions."""
        return self.lm_head(self._hidden(ids, cache, mask, positions)[:, -1])

    def _hidden(
        self,
        ids: Tensor,
        cache: Sequence[KVCache] | None,
        mask: Mask | None,
        positions: Tensor | None,
    ) -> Tensor:
        if not isinstance(ids, Tensor) or ids.dim() != 2 or ids.dtype not in _IDS:
            raise ValueError(
                f"GPT(ids {format_value(ids)}): token ids must be integers [B, T], "
                f"of torch.int64 or "
                f"int32; one row alone is ids[None]"
            )
        if not ids.shape[1]:
            raise ValueError(f"GPT(ids {list(ids.shape)}): each row must have at least one token")
        self._check_ids(ids)
        if cache is not None and len(cache) != self.config.n_layer:
            raise ValueError(
                f"cache has {len(cache)} parts but the model {self.config.n_layer} layers; "
                f"create it with model.new_cache()"
            )
        if positions is None:
            start = cache[0].length if cache is not None else 0
            self._check_context(start + ids.shape[1])
            positions = torch.arange(start, start + ids.shape[1], device=ids.device)
        elif _readable(positions):
            self._check_context(int(positions.max()) + 1)
        full = Causal() if mask is None else Causal() & mask
        marks = [part.mark() for part in cache or ()]
        try:
            return self.transformer(ids, positions, full, cache)
        except BaseException:  # all layers must cache the same tokens
            for part, mark in zip(cache or (), marks, strict=True):
                part.rewind(mark)
            raise

    def new_cache(self) -> list[KVCache]:
        """Return an empty cache for `forward`, one part per layer."""
        return [KVCache() for _ in range(self.config.n_layer)]

    @classmethod
    def from_pretrained(
        cls,
        folder: str | Path,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> GPT:
        """Read a Hugging Face GPT-2 folder; the model is in evaluation mode.

        Raises:
            FolderError: the folder is missing or damaged, or is not a GPT-2 model.
        """
        where = Path(folder) / CONFIG
        config = GPTConfig.from_json(read_config(folder), str(where))
        stored = _stored_weights(Path(folder))
        check_size(config.weights, sum(one.size for one in stored.values()), str(where))
        with torch.device("meta"):
            model = cls(config)
        shapes = {name: tuple(value.shape) for name, value in model._weights().items()}
        model._take(_read_weights(Path(folder), stored, shapes, dtype))
        return model.requires_grad_(True).to(device).eval()

    @classmethod
    def of_weights(cls, config: GPTConfig, weights: Mapping[str, Tensor]) -> GPT:
        """Create a model with these weights, which are not copied; nothing is initialized."""
        with torch.device("meta"):
            model = cls(config)
        model._take(weights)
        return model

    def _take(self, weights: Mapping[str, Tensor]) -> None:
        self.load_state_dict(weights, strict=False, assign=True)
        if self.config.tie_word_embeddings:
            self.lm_head.weight = self.transformer.wte.weight

    def save_pretrained(self, folder: str | Path, tokenizer: Tokenizer | None = None) -> None:
        """Write a folder for `from_pretrained` and `transformers`; no file is left incomplete.

        Raises:
            FolderError: the folder cannot be written.
        """
        config = self.config.to_json()
        config["dtype"] = str(self.transformer.wte.weight.dtype).removeprefix("torch.")
        write_folder(folder, config, self._weights(), tokenizer)

    def _weights(self) -> dict[str, Tensor]:
        """Return the state to save: a tied head is not stored twice."""
        tied = self.config.tie_word_embeddings
        return {k: v for k, v in self.state_dict().items() if not (tied and k == _HEAD)}

    def _check_ids(self, ids: Tensor) -> None:
        if not _readable(ids):
            return
        low, high = (int(end) for end in ids.aminmax())
        if low < 0 or high >= self.config.vocab_size:
            raise ValueError(
                f"ids must be below vocab_size={self.config.vocab_size}, got {low} to {high}; "
                f"was the text encoded with another tokenizer?"
            )

    def _check_context(self, end: int) -> None:
        if end > self.config.n_positions:
            raise ValueError(
                f"{end} tokens exceed the model's context of {self.config.n_positions}; "
                f"shorten the text"
            )


_IDS = (torch.int64, torch.int32)


def _readable(ids: Tensor) -> bool:
    """Return True if values can be read without waiting for a device."""
    return ids.device.type == "cpu" and not torch.compiler.is_compiling() and ids.numel() > 0


# ── folders ─────────────────────────────────────────────────────────────────────────────────────

_HEAD, _EMBEDDING = "lm_head.weight", "transformer.wte.weight"
_MASK_BUFFERS = re.compile(r"transformer\.h\.\d+\.attn\.(bias|masked_bias)")


def load(folder: str | Path) -> tuple[GPT, Tokenizer]:
    """Read a model and its tokenizer from a Hugging Face GPT-2 folder.

    Raises:
        FolderError: the folder is missing or damaged, or is not a GPT-2 model.
    """
    model, tokenizer = GPT.from_pretrained(folder), read_tokenizer(folder)
    if tokenizer.get_vocab_size() > model.config.vocab_size:
        raise FolderError(
            f"{folder}: tokenizer.json has {tokenizer.get_vocab_size()} tokens but the model "
            f"{model.config.vocab_size}; they do not belong together"
        )
    return model, tokenizer


def builtin() -> Path:
    """Return the folder of the built-in model."""
    return Path(__file__).parent / "builtin"


def _stored_weights(folder: Path) -> dict[str, StoredTensor]:
    """Return the folder's stored tensors, not yet read, by their names in the model."""
    found: dict[str, StoredTensor] = {}
    for one in read_headers(weight_files(folder)):
        known = one.name.startswith(("transformer.", "lm_head."))
        full = one.name if known else f"transformer.{one.name}"
        if _MASK_BUFFERS.fullmatch(full):  # in old checkpoints
            continue
        if full in found:
            raise FolderError(
                f"{one.path}: {one.name} is stored twice (also in {found[full].path})"
            )
        found[full] = one
    return found


def _read_weights(
    folder: Path,
    stored: dict[str, StoredTensor],
    shapes: Mapping[str, tuple[int, ...]],
    dtype: torch.dtype,
) -> dict[str, Tensor]:
    """Read exactly the weights in `shapes`; names and shapes are compared before any is read.

    If a tied head is stored, it must equal the embedding.
    """
    twin = stored.pop(_HEAD, None) if _HEAD not in shapes else None
    if missing := sorted(shapes.keys() - stored.keys()):
        raise FolderError(
            f"{folder}: {_are(missing)} missing from the weights, but required by {CONFIG}"
        )
    if extra := sorted(stored.keys() - shapes.keys()):
        names = _are([stored[name].name for name in extra])
        raise FolderError(f"{folder}: {names} in the weights, but not in a GPT-2 of this {CONFIG}")
    for name, shape in shapes.items():
        held = stored[name]
        if held.shape != shape:
            raise FolderError(
                f"{held.path}: {held.name} has shape {list(held.shape)}, "
                f"but {CONFIG} requires {list(shape)}"
            )
        if held.dtype not in ("F64", "F32", "F16", "BF16"):
            raise FolderError(f"{held.path}: {held.name} must hold floats, got {held.dtype}")
    weights = {
        name: check_values(stored[name].read().to(dtype), f"{stored[name].path}: {name}")
        for name in shapes
    }
    if twin is not None and not torch.equal(twin.read().to(dtype), weights[_EMBEDDING]):
        raise FolderError(
            f"{twin.path}: {_HEAD} differs from {_EMBEDDING}, but {CONFIG} ties them; "
            f'set "tie_word_embeddings": false if the head is its own'
        )
    return weights


def _are(names: list[str]) -> str:
    return and_more(names) + (" are" if len(names) > 1 else " is")
