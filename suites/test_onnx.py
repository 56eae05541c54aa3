"""ONNX's node cases of `Attention`, with the inputs and outputs that the package `onnx` makes."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import onnx.backend.test.case.node as cases_of_onnx
import pytest
import torch
from torch import Tensor

import headwise as hw
from headwise.backends import BACKENDS
from headwise.core.reference import attention

NAMES = [backend.name for backend in BACKENDS]
RELATIVE = {torch.float32: 1e-3, torch.float16: 2**-9, torch.bfloat16: 2**-6}
"""ONNX's own tolerances; of float16, too, two units in the last place, as of bfloat16: its answers
are computed in float16 throughout."""


@dataclass(frozen=True)
class Case:
    """A node with its inputs and expected outputs by their formal names."""

    name: str
    attributes: dict[str, Any]
    inputs: dict[str, Tensor]
    outputs: dict[str, Tensor]


def collect() -> list[Case]:
    """Every case that the package describes; describing it calls `expect`."""
    found = []

    def expect(node: Any, inputs: list[Any], outputs: list[Any], name: str, **_: Any) -> None:
        given = dict(zip((n for n in node.input if n), map(tensor, inputs), strict=True))
        wanted = dict(zip((n for n in node.output if n), map(tensor, outputs), strict=True))
        attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
        found.append(Case(name, attributes, given, wanted))

    np.random.seed(0)
    kept, cases_of_onnx.expect = cases_of_onnx.expect, expect
    try:
        importlib.import_module("onnx.backend.test.case.node.attention")
    finally:
        cases_of_onnx.expect = kept
    return found


def tensor(array: np.ndarray) -> Tensor:
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(np.ascontiguousarray(array))


CASES = collect()


def test_all_of_them_are_here() -> None:
    assert len(CASES) == 93


@pytest.mark.parametrize("backend", NAMES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_attention(case: Case, backend: str, count: Callable[..., None]) -> None:
    call, present = translate(case)
    options = {name: call[name] for name in ("mask", "scale", "softcap")}
    q, k, v = call["q"], call["k"], call["v"]
    refused = {c.name: c.reasons for c in hw.explain(q, k, v, **options).choices}[backend]
    if refused:
        with pytest.raises(ValueError, match="cannot run this call"):
            hw.attend(q, k, v, **options, backend=backend)
        count(refused=1)
        return
    seen = hw.observe(q, k, v, **options, backend=backend)
    assert torch.equal(seen.out, hw.attend(q, k, v, **options, backend=backend))
    out = seen.out if case.inputs["Q"].dim() == 4 else seen.out.transpose(1, 2).flatten(2)
    wanted = case.outputs
    agree(out, wanted["Y"])
    if "present_key" in wanted:
        assert torch.equal(present[0], wanted["present_key"])
        assert torch.equal(present[1], wanted["present_value"])
    if "qk_matmul_output" in wanted:
        agree(matrix(case, call, seen), wanted["qk_matmul_output"])
    count(served=1)


def translate(case: Case) -> tuple[dict[str, Any], tuple[Tensor, Tensor]]:
    """The call of headwise that the node is, and the keys and values that it hands on."""
    given, attributes = case.inputs, case.attributes
    q, k, v = given["Q"], given["K"], given["V"]
    if q.dim() == 3:
        heads, kv_heads = attributes["q_num_heads"], attributes["kv_num_heads"]
        q, k, v = (
            x.unflatten(2, (n, -1)).transpose(1, 2)
            for x, n in ((q, heads), (k, kv_heads), (v, kv_heads))
        )
    cache = hw.KVCache()
    if "past_key" in given:
        cache.append(given["past_key"], given["past_value"])
    past = cache.length
    k, v = cache.append(k, v)
    mask = mask_of(case, q.shape[2], k.shape[2], past)
    softcap = attributes.get("softcap") or None
    return {"q": q, "k": k, "v": v, "mask": mask, "softcap": softcap} | {
        "scale": attributes.get("scale")
    }, (k, v)


def mask_of(case: Case, queries: int, keys: int, past: int) -> hw.Mask | None:
    """The node's masks joined: its tensor, the keys that are padding, causality, and a window."""
    given, parts = case.inputs, []
    if "attn_mask" in given:
        table = given["attn_mask"]
        blocked = False if table.dtype == torch.bool else -torch.inf
        table = torch.nn.functional.pad(table, (0, keys - table.shape[-1]), value=blocked)
        parts.append(hw.Dense(table) if table.dtype == torch.bool else hw.Bias(table))
    lengths = given.get("nonpad_kv_seqlen")
    if lengths is not None:
        parts.append(hw.Padding(lengths))
    # Queries stand behind the past, or at the end of the real keys, or with the first key.
    first = torch.tensor([past]) if lengths is None else lengths - queries
    parts += positions(case.attributes, first, queries, keys)
    mask = None
    for part in parts:
        mask = part if mask is None else mask & part
    return mask


def positions(attributes: dict[str, Any], first: Tensor, queries: int, keys: int) -> list[hw.Mask]:
    """What depends on the distance from query to key, as headwise's own masks where they fit."""
    causal = bool(attributes.get("is_causal"))
    left, right = (attributes.get(f"{side}_window_size", -1) for side in ("left", "right"))
    if not causal and left < 0 and right < 0:
        return []
    if bool((first == keys - queries).all()) and causal:
        return [hw.Window(left + 1) if left >= 0 else hw.Causal()]
    behind = first.view(-1, 1, 1, 1) + torch.arange(queries)[:, None] - torch.arange(keys)
    seen = behind >= 0 if causal else torch.ones_like(behind, dtype=torch.bool)
    seen &= (behind <= left) if left >= 0 else True
    seen &= (-behind <= right) if right >= 0 else True
    return [hw.Dense(seen)]


def matrix(case: Case, call: dict[str, Any], seen: hw.stats.Seen) -> Tensor:
    """The matrix that the node shows: scores, capped, with biases, or the probabilities."""
    mode = case.attributes.get("qk_matmul_output_mode", 0)
    if mode == 3:
        return seen.weights()
    parts = {"mask": mode == 2, "softcap": mode in (1, 2), "scale": True}
    options = {name: call[name] for name, meant in parts.items() if meant}
    return attention(call["q"], call["k"], call["v"], **options).logits


def agree(ours: Tensor, theirs: Tensor) -> None:
    tolerance = RELATIVE[theirs.dtype]
    torch.testing.assert_close(ours.to(theirs.dtype), theirs, rtol=tolerance, atol=1e-7)
