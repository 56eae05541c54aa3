"""GPT-2's attention on Modular MAX, an optional rung that requires an installed MAX.

This is the class of Modular's book "Build an LLM from scratch in MAX", with the names of its torch
twin in `fused.py`. MAX is proprietary software under its own license (the MAX Platform Software
License). headwise neither depends on MAX nor ships any part of it, and no other module of headwise
imports this file. It runs on MAX 25.7 (`max.nn.module_v3`) and 26.7 (`max.experimental.nn`).

It differs from the book in two ways: `causal_mask` is aligned to the end (the book's ignores cached
tokens), and the layer has a cached form, `attend_cached`. Compile the layer once for all
lengths: in eager mode, MAX compiles every operation separately, which takes minutes.

    layer = load_gpt2(GPT2MultiHeadAttention(config), torch_layer.state_dict())
    run = compile_layer(layer)
    y = run(x)  # numpy arrays or torch tensors in, numpy arrays out
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import numpy as np
from torch import Tensor as TorchTensor

from ._checks import check_heads, check_sizes
from .fused import GPT2Sizes, check_variant

try:
    from max.driver import CPU
    from max.dtype import DType
    from max.experimental import functional as F
    from max.experimental.tensor import Tensor, default_device
    from max.graph import DeviceRef, Dim, TensorType, ops

    try:
        from max.experimental.nn import Linear, Module
    except ImportError:  # MAX 25.7
        from max.nn.module_v3 import Linear, Module
except ImportError as absent:
    raise ImportError(
        "headwise.systems.max_gpt2 needs Modular MAX, which headwise does not install: it is "
        "proprietary, with its own license. To install it: pip install max==25.7.0 rich "
        f"transformers ({absent})"
    ) from absent

Array = np.ndarray | TorchTensor


@F.functional
def causal_mask(
    sequence_length: Any, num_tokens: Any, *, dtype: Any = DType.float32, device: Any = None
) -> Any:
    """Return the mask to add to the scores of queries that follow `num_tokens` cached tokens.

    The mask is aligned to the end: query i is at position `num_tokens + i`, so the last query sees
    the last key.

    Args:
        sequence_length: T, the number of queries; an int or a symbolic dimension of MAX.
        num_tokens: P, the number of tokens cached before them.

    Returns:
        `[T, P + T]`: 0 where key j is visible, `j <= P + i`, and -inf elsewhere.
    """
    place = DeviceRef.CPU() if device is None else device
    length, past = Dim(sequence_length), Dim(num_tokens)
    hidden, seen = (ops.constant(value, dtype, place) for value in (-math.inf, 0.0))
    new = ops.band_part(ops.broadcast_to(hidden, [length, length]), None, 0, exclude=True)
    return ops.concat([ops.broadcast_to(seen, [length, past]), new], axis=1)


class GPT2MultiHeadAttention(Module):
    """Causal self-attention with GPT-2's names: `c_attn` projects to q, k and v, `c_proj` back.

    Both are MAX `Linear` layers with weights `[out, in]`: `load_gpt2` transposes those of
    GPT-2. Weights are on the CPU in float32, and are not initialized.

    Args:
        config: has `n_embd`, the width E, and `n_head`, the number of heads H.

    Raises:
        ValueError: a size is below 1, n_embd is not a multiple of n_head, or the config requires a
            variant of GPT-2's scaling that is not supported.
    """

    def __init__(self, config: GPT2Sizes) -> None:
        check_sizes("GPT2MultiHeadAttention", n_embd=config.n_embd, n_head=config.n_head)
        check_heads("GPT2MultiHeadAttention", "n_embd", config.n_embd, "n_head", config.n_head)
        check_variant(config)
        super().__init__()
        self.embed_dim = config.n_embd
        self.num_heads = config.n_head
        self.head_dim = config.n_embd // config.n_head
        # Random weights are created on first use, so never if others are loaded before that.
        lazy = F.lazy() if hasattr(F, "lazy") else nullcontext()
        with default_device(CPU()), lazy:
            self.c_attn = Linear(self.embed_dim, 3 * self.embed_dim, bias=True)
            self.c_proj = Linear(self.embed_dim, self.embed_dim, bias=True)

    def forward(self, hidden_states: Any) -> Any:
        """Attend from every position to itself and earlier ones, `[B, T, E]` to `[B, T, E]`."""
        query, key, value = self._project(hidden_states)
        return self._output(self._attn(query, key, value))

    __call__ = forward  # MAX 25.7 calls this, MAX 26.7 calls forward

    def attend_cached(self, hidden_states: Any, past_key: Any, past_value: Any) -> tuple[Any, ...]:
        """Continue a text whose keys and values are cached.

        Args:
            hidden_states: the next tokens `[B, T, E]`.
            past_key: `[B, H, P, D]` of the tokens before them; P may be 0.
            past_value: as past_key.

        Returns:
            The output `[B, T, E]`, and key and value `[B, H, P + T, D]` for the next call.
        """
        query, key, value = self._project(hidden_states)
        key = F.concat([past_key, key], axis=-2)
        value = F.concat([past_value, value], axis=-2)
        out = self._attn(query, key, value, num_tokens=past_key.shape[-2])
        return self._output(out), key, value

    def _project(self, hidden_states: Any) -> tuple[Any, ...]:
        """Project `[B, T, E]` to q, k and v `[B, H, T, D]`."""
        parts = F.split(self.c_attn(hidden_states), [self.embed_dim] * 3, axis=-1)
        return tuple(self._split_heads(part, self.num_heads, self.head_dim) for part in parts)

    def _output(self, heads: Any) -> Any:
        """Project `[B, H, T, D]` to `[B, T, E]`."""
        return self.c_proj(self._merge_heads(heads, self.num_heads, self.head_dim))

    def _attn(self, query: Any, key: Any, value: Any, num_tokens: Any = 0) -> Any:
        """Attend from queries `[B, H, T, D]` to keys and values `[B, H, P + T, D]`."""
        scores = query @ key.transpose(-1, -2) * self.head_dim**-0.5
        mask = causal_mask(query.shape[-2], num_tokens, dtype=scores.dtype, device=scores.device)
        return F.softmax(scores + mask) @ value

    def _split_heads(self, tensor: Any, num_heads: int, attn_head_size: int) -> Any:
        """Split `[B, T, H * D]` into `[B, H, T, D]`."""
        shape = [*tensor.shape[:-1], num_heads, attn_head_size]
        return tensor.reshape(shape).transpose(-3, -2)

    def _merge_heads(self, tensor: Any, num_heads: int, attn_head_size: int) -> Any:
        """Merge `[B, H, T, D]` into `[B, T, H * D]`."""
        tensor = tensor.transpose(-3, -2)
        return tensor.reshape([*tensor.shape[:-2], num_heads * attn_head_size])


class _Cached(Module):
    """The layer's cached form as a module that MAX can compile."""

    def __init__(self, layer: GPT2MultiHeadAttention) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, hidden_states: Any, past_key: Any, past_value: Any) -> tuple[Any, ...]:
        return self.layer.attend_cached(hidden_states, past_key, past_value)

    __call__ = forward


def load_gpt2(layer: GPT2MultiHeadAttention, state: Mapping[str, Array]) -> GPT2MultiHeadAttention:
    """Load GPT-2's weights into the layer, and return it.

    Args:
        layer: a layer of the same sizes.
        state: the state of one torch layer in the layout `gpt2`, such as `fused.py`'s or Hugging
            Face's `GPT2Attention.state_dict()`: `c_attn.weight` `[E, 3E]`, `c_attn.bias`,
            `c_proj.weight` `[E, E]`, `c_proj.bias`, as torch tensors or numpy arrays. Mask
            buffers of old files are ignored.

    Raises:
        ValueError: the names or shapes differ.
    """
    width = layer.embed_dim
    shapes = {
        "c_attn.weight": (width, 3 * width),
        "c_attn.bias": (3 * width,),
        "c_proj.weight": (width, width),
        "c_proj.bias": (width,),
    }
    weights = {name: state[name] for name in state if name not in ("bias", "masked_bias")}
    given = {name: tuple(array.shape) for name, array in weights.items()}
    if given != shapes:
        raise ValueError(
            f"load_gpt2(n_embd={width}): the state must have {shapes}, got {given}; "
            "headwise.convert(…, target='gpt2') converts other layouts to this one"
        )
    layer.load_state_dict({name: _max_tensor(_numpy(array).T) for name, array in weights.items()})
    return layer


def compile_layer(
    layer: GPT2MultiHeadAttention, batch: int | str = "batch", length: int | str = "length"
) -> Callable[[Array], np.ndarray]:
    """Compile the layer for the CPU.

    Args:
        layer: a layer with loaded weights; later changes do not affect the compiled function.
        batch: the number of rows in a call; a name allows any number.
        length: the number of tokens in a row; a name allows any number.

    Returns:
        A function from `[B, T, E]` to `[B, T, E]` in float32, from numpy arrays or torch tensors to
        numpy arrays. It raises ValueError for other shapes.
    """
    run = layer.compile(_type(batch, length, layer.embed_dim))

    def call(hidden_states: Array) -> np.ndarray:
        _check("compile_layer", layer, hidden_states)
        return _from_max(run(_max_tensor(_numpy(hidden_states))))

    return call


def compile_cached(
    layer: GPT2MultiHeadAttention,
    batch: int | str = "batch",
    length: int | str = "length",
    past: int | str = "past",
) -> Callable[[Array, Array, Array], tuple[np.ndarray, ...]]:
    """Compile `attend_cached` for the CPU, like `compile_layer`, with `past` cached tokens.

    Returns:
        A function of the next tokens `[B, T, E]` and the keys and values of earlier tokens,
        `[B, H, P, D]` each. It returns the output and the keys and values for the next call.
    """
    cached = _type(batch, layer.num_heads, past, layer.head_dim)
    run = _Cached(layer).compile(_type(batch, length, layer.embed_dim), cached, cached)

    def call(hidden_states: Array, past_key: Array, past_value: Array) -> tuple[np.ndarray, ...]:
        arrays = (hidden_states, past_key, past_value)
        _check("compile_cached", layer, *arrays)
        return tuple(map(_from_max, run(*(_max_tensor(_numpy(array)) for array in arrays))))

    return call


def _check(name: str, layer: GPT2MultiHeadAttention, x: Array, *past: Array) -> None:
    call = f"{name}(…)({', '.join(str(list(array.shape)) for array in (x, *past))})"
    if x.ndim != 3 or x.shape[2] != layer.embed_dim:
        raise ValueError(f"{call}: the input must be [B, T, {layer.embed_dim}]")
    shape, heads = tuple(past[0].shape) if past else (), (layer.num_heads, layer.head_dim)
    fits = len(shape) == 4 and (shape[0], shape[1], shape[3]) == (x.shape[0], *heads)
    if past and not (fits and shape == tuple(past[1].shape)):
        want = f"[{x.shape[0]}, {heads[0]}, P, {heads[1]}]"
        raise ValueError(f"{call}: past_key and past_value must be {want}")


def _type(*shape: int | str) -> Any:
    return TensorType(DType.float32, shape, device=DeviceRef.CPU())


def _numpy(array: Array) -> np.ndarray:
    return array.detach().float().cpu().numpy() if isinstance(array, TorchTensor) else array


def _max_tensor(array: np.ndarray) -> Any:
    return Tensor.from_dlpack(np.ascontiguousarray(array, dtype=np.float32))


def _from_max(tensor: Any) -> np.ndarray:
    return np.from_dlpack(tensor)
