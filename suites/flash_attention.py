"""flash-attention's functions, computed by `attend`, and its own test module run on them.

Sequences come as `[B, T, H, D]`, or packed as `[ΣT, H, D]` with the places where each starts;
causal masks and windows are aligned to the last key, as in headwise.
"""

import re
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

import headwise as hw

BACKEND = "auto"


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] | Tensor = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,  # headwise always is
    return_attn_probs: bool = False,
) -> Any:
    """`flash_attn_func`."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    mask = mask_of(q, k, causal, *(int(n) for n in window_size), alibi_slopes)
    seen = hw.observe(
        *(q, k, v),
        mask=mask,
        scale=softmax_scale,
        softcap=softcap or None,
        dropout=dropout_p,
        backend=BACKEND,
    )
    out = seen.out.transpose(1, 2)
    return (out, seen.lse, None) if return_attn_probs else out


def mask_of(
    q: Tensor, k: Tensor, causal: bool, left: int, right: int, slopes: Tensor | None
) -> hw.Mask | None:
    """So many keys before and after a query's position, −1 for all; slopes `[H]` or `[B, H]`."""
    queries, keys = q.shape[2], k.shape[2]
    behind = torch.arange(queries)[:, None] + (keys - queries) - torch.arange(keys)
    parts: list[hw.Mask] = []
    if causal:
        parts.append(hw.Causal() if left < 0 else hw.Window(left + 1))
    elif left >= 0 or right >= 0:
        near = torch.ones_like(behind, dtype=torch.bool)
        near &= behind <= left if left >= 0 else near
        near &= -behind <= right if right >= 0 else near
        parts.append(hw.Dense(near))
    if slopes is not None:
        parts.append(hw.Bias(-slopes.view(-1, q.shape[1], 1, 1) * behind.abs()))
    mask = None
    for part in parts:
        mask = part if mask is None else mask & part
    return mask


def attend_kvpacked(q: Tensor, kv: Tensor, *args: Any, **options: Any) -> Any:
    """`flash_attn_kvpacked_func`."""
    return attend(q, *kv.unbind(2), *args, **options)


def attend_qkvpacked(qkv: Tensor, *args: Any, **options: Any) -> Any:
    """`flash_attn_qkvpacked_func`."""
    return attend(*qkv.unbind(2), *args, **options)


def attend_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts_q: Tensor,
    starts_k: Tensor,
    longest_q: int,
    longest_k: int,
    *args: Any,
    alibi_slopes: Tensor | None = None,
    block_table: Tensor | None = None,
    return_attn_probs: bool = False,
    **options: Any,
) -> Any:
    """`flash_attn_varlen_func`: one call for each sequence."""
    outs = []
    for b, (i, j) in enumerate(zip(starts_q[:-1], starts_k[:-1], strict=True)):
        mine, last = slice(i, starts_q[b + 1]), starts_k[b + 1]
        if block_table is None:
            keys, values = k[None, j:last], v[None, j:last]
        else:
            pages = (x[block_table[b].long()].flatten(0, 1) for x in (k, v))
            keys, values = (x[None, : last - j] for x in pages)
        slopes = None if alibi_slopes is None else alibi_slopes.view(-1, q.shape[1])
        slopes = slopes if slopes is None or len(slopes) == 1 else slopes[b : b + 1]
        outs.append(attend(q[None, mine], keys, values, *args, alibi_slopes=slopes, **options)[0])
    out = torch.cat(outs)
    return (out, None, None) if return_attn_probs else out


def attend_varlen_kvpacked(q: Tensor, kv: Tensor, *args: Any, **options: Any) -> Any:
    """`flash_attn_varlen_kvpacked_func`."""
    return attend_varlen(q, *kv.unbind(1), *args, **options)


def attend_varlen_qkvpacked(
    qkv: Tensor, starts: Tensor, longest: int, *args: Any, **options: Any
) -> Any:
    """`flash_attn_varlen_qkvpacked_func`."""
    q, k, v = qkv.unbind(1)
    return attend_varlen(q, k, v, starts, starts, longest, longest, *args, **options)


def attend_with_cache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    *,
    cache_seqlens: Tensor,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    rotary_cos: None,
    rotary_sin: None,
    cache_batch_idx: None,
    rotary_interleaved: bool,
    num_splits: int,
    **options: Any,
) -> Tensor:
    """`flash_attn_with_kvcache`: new keys are written in place, then one call for each sequence."""
    outs = []
    for b, length in enumerate(cache_seqlens.tolist()):
        places = torch.arange(k_cache.shape[1] if block_table is None else 0)
        if block_table is not None:
            size = k_cache.shape[1]
            places = (block_table[b].long()[:, None] * size + torch.arange(size)).flatten()
        both = k_cache, v_cache
        rows = [x[b] if block_table is None else x.flatten(0, 1) for x in both]
        if k is not None and v is not None:
            new = places[length : length + k.shape[1]]
            rows[0][new], rows[1][new] = k[b], v[b]
            length += k.shape[1]
        first = 0 if cache_leftpad is None else int(cache_leftpad[b])
        keys, values = (row[places[first:length]][None] for row in rows)
        slopes = None if alibi_slopes is None else alibi_slopes[b]
        outs.append(attend(q[b : b + 1], keys, values, alibi_slopes=slopes, **options))
    return torch.cat(outs)


def load_tests(folder: Path) -> ModuleType:
    """flash-attention's `tests/test_flash_attn.py`, on the CPU, with the functions above."""
    package = ModuleType("flash_attn")
    package.__path__ = []
    for name, function in {
        "func": attend,
        "kvpacked_func": attend_kvpacked,
        "qkvpacked_func": attend_qkvpacked,
        "varlen_func": attend_varlen,
        "varlen_kvpacked_func": attend_varlen_kvpacked,
        "varlen_qkvpacked_func": attend_varlen_qkvpacked,
        "with_kvcache": attend_with_cache,
    }.items():
        setattr(package, f"flash_attn_{name}", function)
    padding = _load("flash_attn.bert_padding", folder / "flash_attn" / "bert_padding.py")
    # What only its CUDA kernels have: the shape of their dropout masks, and rotary embeddings.
    interface, rotary = ModuleType("interface"), ModuleType("rotary")
    interface._get_block_size_n = rotary.apply_rotary_emb = None
    modules = {
        "flash_attn": package,
        "flash_attn.bert_padding": padding,
        "flash_attn.flash_attn_interface": interface,
        "flash_attn.layers.rotary": rotary,
    }
    path = folder / "tests" / "test_flash_attn.py"
    with (
        patch.dict(sys.modules, modules),
        patch("torch.cuda.get_device_capability", lambda _: (8, 0)),
    ):
        return _load("flash_attention_tests", path, on_cpu=True)


def _load(name: str, path: Path, on_cpu: bool = False) -> ModuleType:
    text = path.read_text()
    if on_cpu:
        text = re.sub(r'device="cuda"', 'device="cpu"', text)
        text = re.sub(r'device = "cuda"', 'device = "cpu"', text)
    module = ModuleType(name)
    exec(compile(text, str(path), "exec"), module.__dict__)
    return module
