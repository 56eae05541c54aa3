"""FlexAttention, onnxruntime and whole layers: the peers in `native.py`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

import headwise as hw
from every_statistic import why
from layer import OURS, ByHand, assert_same
from native_own import forward_calls, later, tolerance
from native_run import DTYPES, MATMUL, NATIVE, SDPA, SEEING, Run, Shape, Work


def flex(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Work:
    """PyTorch's FlexAttention, compiled for these shapes."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    length, mask = q.shape[2], None
    if causal:
        mask = create_block_mask(
            lambda b, h, i, j: i >= j, None, None, length, length, device="cpu"
        )
    torch._dynamo.reset()  # shapes of another length would be compiled as one that varies
    compiled = torch.compile(flex_attention, fullgraph=True, dynamic=False)
    return partial(compiled, q, k, v, block_mask=mask)


def onnx_runtime(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Work:
    """Microsoft's MultiHeadAttention on `[B, T, H·D]`, inputs and output bound to tensors."""
    import numpy as np
    import onnxruntime  # pyright: ignore[reportMissingImports]
    from onnx import TensorProto, helper  # pyright: ignore[reportMissingImports]

    if q.dtype != torch.float32:
        raise NotImplementedError(f"its kernel for CPUs has no {q.dtype}")
    merged = [x.transpose(1, 2).flatten(2).contiguous() for x in (q, k, v)]
    out, shape = torch.empty_like(merged[0]), list(merged[0].shape)
    names = ("q", "k", "v", "out")
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name in names]
    numbers = {"num_heads": q.shape[1], "unidirectional": int(causal)}
    kind = {"domain": "com.microsoft", **numbers}
    node = helper.make_node("MultiHeadAttention", list("qkv"), ["out"], **kind)
    graph = helper.make_graph([node], "attention", ends[:3], ends[3:])
    sets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=sets, ir_version=10)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    # Threads that spin after a call would take the cores of whoever has the next turn.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    binding = session.io_binding()
    for name, x in zip(names, [*merged, out], strict=True):
        bind = binding.bind_output if name == "out" else binding.bind_input
        bind(name, "cpu", 0, np.float32, shape, x.data_ptr())

    def call(kept: list[Tensor] = merged) -> Tensor:  # the binding holds addresses only
        session.run_with_iobinding(binding)
        return out.unflatten(-1, (q.shape[1], -1)).transpose(1, 2)

    return call


def peers(run: Run, shape: Shape) -> None:
    """Attention alone, in both dtypes."""
    calls: dict[str, Work] = {}
    refused: dict[str, str] = {}
    with torch.no_grad():
        for name, dtype in DTYPES.items():
            q, k, v = shape.inputs(dtype)
            own = forward_calls(shape, dtype)
            want = own[SDPA]()
            calls |= {f"{name}: {x}": own[x] for x in (NATIVE, SEEING, SDPA, MATMUL) if x in own}
            for peer, build in (("FlexAttention", flex), ("onnxruntime", onnx_runtime)):
                try:
                    work = build(q, k, v, shape.causal)
                    found = work()
                except ImportError as error:
                    refused[f"{name}: {peer}"] = f"not installed: {error}"
                    continue
                except (NotImplementedError, RuntimeError) as error:  # the compiler's errors too
                    refused[f"{name}: {peer}"] = why(error)
                    continue
                torch.testing.assert_close(found, want, **tolerance(dtype))
                calls[f"{name}: {peer}"] = work
        taken = run.take(calls)
    run.keep("peers", shape, taken, refused)


def layers(run: Run, length: int) -> None:
    """Whole layers of width 768 with equal weights, causal, float32, forward."""
    torch.manual_seed(0)
    shape = Shape(max(1, 1024 // length), 12, length, length, 64, causal=True)
    ours, by_hand = hw.MultiHeadAttention(768, 12, backend="native"), ByHand()
    theirs = nn.MultiheadAttention(768, 12, batch_first=True)
    by_hand.load_state_dict(ours.state_dict())
    with torch.no_grad():
        theirs.in_proj_weight.copy_(ours.qkv.weight)
        theirs.in_proj_bias.copy_(ours.qkv.bias)
        theirs.out_proj.load_state_dict(ours.out.state_dict())
    x, pull = torch.randn(2, shape.batch, length, 768)
    hidden = later(shape)
    kinds: dict[str, Callable[[Tensor], Tensor]] = {
        OURS: lambda x: ours(x, mask=hw.Causal()),
        "fused qkv + SDPA": by_hand,
        "nn.MultiheadAttention": lambda x: theirs(
            x, x, x, attn_mask=hidden, is_causal=True, need_weights=False
        )[0],
    }
    assert_same(kinds, x, pull)
    for module in (ours, by_hand, theirs):
        module.eval()
    calls: dict[str, Work] = {
        f"float32: {NATIVE if name == OURS else name}": partial(layer, x)
        for name, layer in kinds.items()
    }
    with torch.inference_mode():
        run.keep("layers", shape, run.take(calls), {})
