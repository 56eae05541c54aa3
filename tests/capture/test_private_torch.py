"""What watching rests on that PyTorch does not promise: each property, on the PyTorch at hand."""

from __future__ import annotations

import inspect
import subprocess
import sys
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.bias import causal_lower_right
from torch.nn.attention.flex_attention import flex_attention
from torch.overrides import TorchFunctionMode

from headwise.capture import private_torch
from headwise.capture.adapters import flex
from headwise.capture.private_torch import _DISPATCH_CHECKS, without_dispatch


class Names(TorchFunctionMode):
    """Keeps the names of the functions that it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.seen.append(getattr(func, "__name__", ""))
        return func(*args, **(kwargs or {}))


def test_modes_are_a_stack_that_can_be_put_together() -> None:
    one, two = Names(), Names()
    before = private_torch.modes()
    with one:
        private_torch.push_mode(two)
        assert private_torch.modes() == [*before, one, two]
        torch.zeros(1).add(1)
        assert private_torch.pop_mode() is two
        assert private_torch.modes() == [*before, one]
    assert "add" in one.seen
    assert "add" in two.seen


def test_operators_know_their_arguments_by_name() -> None:
    x = torch.ones(2, 3)
    found = private_torch.arguments(torch.ops.aten.add.Tensor, (x, 4), {"alpha": 5})
    assert list(found) == ["self", "other", "alpha"]
    assert found["self"] is x
    assert (found["other"], found["alpha"]) == (4, 5)
    assert private_torch.arguments(torch.ops.aten.add.Tensor, (x, 4), {})["alpha"] == 1


def test_a_backward_pass_knows_itself_and_takes_modes_along() -> None:
    found = []

    class Ask(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx, grad: Tensor) -> Tensor:
            found.append((private_torch.in_backward(), private_torch.modes()))
            return grad * 2

    x = torch.ones(1, requires_grad=True)
    assert not private_torch.in_backward()
    y = Ask.apply(x)
    with Names() as mode:
        without_dispatch(torch.autograd.backward)((y,), (torch.ones(1),))
    [(inside, modes)] = found
    assert inside
    assert mode in modes


@pytest.mark.parametrize("function", [F.multi_head_attention_forward, torch.autograd.backward])
def test_composite_functions_ask_for_modes_by_names_that_can_be_changed(function) -> None:
    asked = [name for name in _DISPATCH_CHECKS if name in function.__code__.co_names]
    assert asked or function is torch.autograd.backward  # which no mode saw before PyTorch 2.11
    assert all(name in function.__globals__ for name in asked)


def test_a_twin_is_run_by_its_parts() -> None:
    x, weight, bias = torch.randn(3, 1, 8), torch.randn(24, 8), torch.randn(24)
    with Names() as mode:
        without_dispatch(F.multi_head_attention_forward)(
            x, x, x, 8, 2, weight, bias, None, None, False, 0.0, weight[:8], bias[:8]
        )
    assert "softmax" in mode.seen
    assert "multi_head_attention_forward" not in mode.seen


def test_a_functions_parameters_are_in_its_code() -> None:
    names = private_torch.parameters(F.multi_head_attention_forward)
    assert names == tuple(inspect.signature(F.multi_head_attention_forward).parameters)


def test_fused_layers_ask_whether_there_is_a_mode() -> None:
    layer, x = nn.TransformerEncoderLayer(8, 2, batch_first=True).eval(), torch.randn(1, 3, 8)
    with torch.no_grad(), Names() as asked:
        layer(x)
    restore = private_torch.replace(torch.overrides, "has_torch_function", lambda tensors: False)
    try:
        with torch.no_grad(), Names() as fused:
            layer(x)
    finally:
        restore()
    assert "_transformer_encoder_layer_fwd" not in asked.seen
    assert "_transformer_encoder_layer_fwd" in fused.seen


def test_flex_attention_has_the_parameters_of_the_code_that_it_gets() -> None:
    code, own = flex._CODE, flex_attention.__code__
    parts = ("co_argcount", "co_kwonlyargcount", "co_posonlyargcount", "co_freevars")
    assert [getattr(code, part) for part in parts] == [getattr(own, part) for part in parts]
    count = own.co_argcount + own.co_kwonlyargcount
    assert code.co_varnames[:count] == own.co_varnames[:count]


def test_compiled_modules_look_for_global_hooks_by_a_name_that_can_be_changed() -> None:
    from torch.nn.modules import module as hooks

    compiled = torch.compile(nn.Linear(2, 2), backend="eager")
    with torch.compiler.set_stance("force_eager"):
        assert not private_torch.global_hooks()
        with hooks.register_module_forward_hook(hook := lambda module, args, out: None):
            assert private_torch.global_hooks() == [hook]
            with pytest.warns(UserWarning, match="there are global hooks on modules"):
                compiled(torch.ones(2))
            restore = private_torch.replace(hooks, "_has_any_global_hook", lambda: False)
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("error")
                    compiled(torch.ones(2))
            finally:
                restore()


def test_the_compiler_leaves_frozen_code_alone() -> None:
    import torch._dynamo.eval_frame  # noqa: F401

    def plain(x: Tensor) -> Tensor:
        return x + 1

    assert not private_torch.skipped(plain.__code__)
    assert private_torch.skipped(private_torch.uncompiled(plain.__code__))


def test_the_compiler_asks_for_its_callback_by_name_and_says_when_code_has_ended() -> None:
    compiled = torch.compile(lambda x: x + 1, backend="eager")
    before = private_torch.compiler()._callback_from_stance
    asked, ended = [], []

    def wrap(found, caller):
        asked.append(caller)
        return lambda *args, **kwargs: found(*args, **kwargs)

    restore = private_torch.compile_with(wrap, ended.append)
    try:
        compiled(torch.ones(2))
        assert len(asked) == 1
        assert ended[-1] is asked[0]
    finally:
        restore()
    assert private_torch.compiler()._callback_from_stance is before


def test_graphs_are_made_by_another_backend_and_kept_beside_the_first() -> None:
    made = []

    def backend(graph, inputs):
        made.append("own")
        return graph

    def other(graph, inputs):
        made.append(f"other {len(inputs)}")
        private_torch.add_buffer(graph, "one_more", torch.zeros(()))
        return graph

    def wrap(found, caller):
        assert private_torch.backend_of(found).compiler_fn is backend
        return private_torch.compiling_with(other)

    compiled = torch.compile(lambda x: x + 1, backend=backend)
    for _ in range(2):
        compiled(torch.ones(2))
        restore = private_torch.compile_with(wrap, lambda caller: None)
        try:
            compiled(torch.ones(2))
        finally:
            restore()
    assert made == ["own", "other 1"]


def test_inputs_of_graphs_are_known_and_sizes_have_hints() -> None:
    layer, found = nn.Linear(2, 3), []

    def backend(graph, inputs):
        found.append(
            [private_torch.example_of(x) for x in graph.graph.find_nodes(op="placeholder")]
        )
        examples = [x.meta["example_value"] for x in graph.graph.nodes if x.op == "placeholder"]
        sizes = [n for x in examples if isinstance(x, Tensor) for n in x.shape]
        found.append([private_torch.hint_of(n) for n in sizes if isinstance(n, torch.SymInt)])
        return graph

    compiled = torch.compile(lambda x: layer(x), backend=backend, dynamic=True)
    with private_torch.more_graphs():
        limit = torch._dynamo.config.recompile_limit
        compiled(torch.ones(5, 2))
    assert limit == 2 * torch._dynamo.config.recompile_limit
    assert any(x is layer.weight for x in found[0])
    assert found[1][0] == 5


def test_a_frame_can_be_left_as_it_is_written() -> None:
    compiled = torch.compile(lambda x: x + 1, backend="eager")
    frames = torch._dynamo.utils.counters["frames"]["ok"]
    restore = private_torch.compile_with(
        lambda found, caller: lambda *args, **kwargs: private_torch.not_compiled(), lambda caller: 0
    )
    try:
        assert compiled(torch.ones(2)).tolist() == [2, 2]
    finally:
        restore()
    assert torch._dynamo.utils.counters["frames"]["ok"] == frames
    compiled(torch.ones(2))
    assert torch._dynamo.utils.counters["frames"]["ok"] == frames + 1


def test_modules_tell_how_they_were_compiled() -> None:
    in_place = nn.Linear(2, 2)
    in_place.compile(backend="eager")
    cases = {
        "": nn.Linear(2, 2),
        "compiled by torch.compile": torch.compile(nn.Linear(2, 2), backend="eager"),
        "compiled in place by torch.compile": in_place,
        "compiled by torch.jit": torch.jit.script(nn.Linear(2, 2)),
    }
    assert {private_torch.compiled(module): module for module in cases.values()} == cases


def test_modes_and_tensors_tell_of_themselves() -> None:
    x = torch.zeros(2)
    assert not private_torch.autocast()
    with torch.autocast("cpu"):
        assert private_torch.autocast()
    before = private_torch.version(x)
    assert private_torch.version(x.add_(1)) == before + 1
    assert private_torch.has_parts(nn.Sequential(nn.Identity()))
    assert not private_torch.has_parts(nn.Identity())
    table = private_torch.table_of(causal_lower_right(2, 3), x.device)
    assert table.tolist() == [[True, True, False], [True, True, True]]
    found = []
    torch.jit.trace(lambda x: (found.append(private_torch.traced()), x + 1)[1], x)
    assert found[0]
    assert not private_torch.traced()


def test_the_compiler_says_whether_it_is_held_back() -> None:
    assert not private_torch.forced_eager()
    with torch.compiler.set_stance("force_eager"):
        assert private_torch.forced_eager()


def test_the_threads_compiler_can_be_taken_away_and_given_back() -> None:
    found = []

    def inside(x: Tensor) -> Tensor:
        own = private_torch.set_eval_frame(None)
        try:
            found.append(own)
            return x + 1
        finally:
            private_torch.set_eval_frame(own)

    inside.__code__ = private_torch.uncompiled(inside.__code__)
    torch.compile(lambda x: inside(x) * 2, backend="eager")(torch.ones(2))
    assert any(own is not None for own in found)


def test_a_graph_ends_before_what_is_kept_out_of_graphs() -> None:
    seen = []

    @private_torch.outside_graphs
    def apart(x: Tensor) -> Tensor:
        seen.append(torch.compiler.is_compiling())
        return x + 1

    def work(x: Tensor) -> Tensor:
        return apart(x * 2) * 3

    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(work, backend="eager", fullgraph=True)(torch.ones(2))
    torch._dynamo.reset()
    assert torch.equal(torch.compile(work, backend="eager")(torch.ones(2)), work(torch.ones(2)))
    assert seen == [False, False]


def test_keeping_out_of_graphs_does_not_load_the_compiler() -> None:
    code = (
        "import sys, torch; from headwise.capture.private_torch import outside_graphs; "
        "outside_graphs(len); print('torch._dynamo' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_a_scaler_keeps_what_it_found_until_its_update() -> None:
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for factor in (1.0, torch.inf, 1.0):
        assert private_torch.skipped_since_update(scaler) is None
        scaler.scale((weight * factor).sum()).backward()
        scaler.unscale_(optimizer)
        assert private_torch.skipped_since_update(scaler) is None
        before = weight.detach().clone()
        scaler.step(optimizer)
        skipped = torch.equal(before, weight)
        assert private_torch.skipped_since_update(scaler) is skipped is (factor == torch.inf)
        scaler.update()
        optimizer.zero_grad()
    off = torch.amp.GradScaler("cpu", enabled=False)
    for other in (off, None, object()):
        assert private_torch.skipped_since_update(other) is None


def test_fused_kernels_give_the_log_sum_exp() -> None:
    for kind in ("flash", "efficient", "cudnn"):
        operator = getattr(torch.ops.aten, f"_scaled_dot_product_{kind}_attention").default
        assert operator in private_torch._WITH_LSE
        names = [argument.name for argument in operator._schema.arguments]
        assert operator._schema.returns[1].name in ("logsumexp", "log_sumexp")
        if kind == "efficient":
            assert names[4] == "compute_log_sumexp"
    q = torch.randn(1, 2, 5, 8)
    attend = torch.nn.functional.scaled_dot_product_attention
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            x = q.clone()
            with private_torch.LogSumExp() as lse:
                out = attend(x, x, x)
        assert torch.equal(out, attend(q, q, q))
        assert lse.of(2, 5) is None  # the kernel is the one for CPUs
