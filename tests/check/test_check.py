"""`headwise.check`: what it takes, what it works out, what it says; and the pytest helper."""

from __future__ import annotations

import dataclasses
import functools
import io
import json
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor, nn

import headwise as hw
from headwise.check import Example, Finding, Verdict, check, explain
from headwise.check.findings.rules import RULES
from headwise.check.target.errors import Broken
from headwise.check.target.layouts import SINGLE, TIME_FIRST, USUAL
from headwise.check.target.resolve import resolve
from headwise.check.target.sizes import BuildSizes, Config
from headwise.layers.attention import MultiHeadAttention
from headwise.testing import assert_attention
from headwise.tutorial.implementations.per_head import CausalAttention, NotebookCausalAttention
from headwise.tutorial.implementations.split import MultiHeadAttn


class Attention(nn.Module):
    """Right, and built from sizes that its subclasses name as people do."""

    def build(self, width: int, heads: int, bias: bool = True) -> None:
        super().__init__()
        self.heads = heads
        self.to_q = nn.Linear(width, width, bias=bias)
        self.to_k = nn.Linear(width, width, bias=bias)
        self.to_v = nn.Linear(width, width, bias=bias)
        self.to_out = nn.Linear(width, width, bias=bias)

    def attend(self, x: Tensor, source: Tensor | None = None, causal: bool = True) -> Tensor:
        source = x if source is None else source
        q, k, v = (
            part(rows).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part, rows in ((self.to_q, x), (self.to_k, source), (self.to_v, source))
        )
        scores = q @ k.mT / q.shape[-1] ** 0.5
        if causal:
            later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=x.device).triu(1)
            scores = scores.masked_fill(later, -torch.inf)
        return self.to_out((torch.softmax(scores, -1) @ v).transpose(1, 2).flatten(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.attend(x)


def named(*names: str) -> type[Attention]:
    """A class whose constructor calls its width and its heads so, and wants nothing else."""
    space: dict[str, Any] = {"Attention": Attention, "nn": nn}
    code = f"""class Named(Attention):
    def __init__(self, {", ".join(names)}):
        self.build({names[0]}, {names[1]})"""
    exec(code, space)
    return space["Named"]


# --- constructor arguments ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "names",
    [
        ("d_in", "num_heads"),
        ("dim", "heads"),
        ("d_model", "h"),
        ("embed_dim", "n_head"),
        ("n_embd", "n_heads"),
        ("hidden_size", "num_attention_heads"),
        ("emb_size", "nhead", "dropout", "block_size", "qkv_bias"),
        ("embedding_dim", "num_heads", "context_length", "p", "max_seq_len"),
        ("E", "H", "T"),
        ("num_hiddens", "nheads", "layer_idx", "device", "dtype"),
    ],
)
def test_arguments_are_worked_out_from_their_names(names: tuple[str, ...]) -> None:
    subject = resolve(named(*names))
    assert (subject.embed_dim, subject.num_heads, subject.out_dim) == (24, 3, 24)
    assert subject.causal
    wished = resolve(named(*names), embed_dim=20, num_heads=4)
    assert (wished.embed_dim, wished.num_heads) == (20, 4)


def test_own_names_and_positions_are_heeded() -> None:
    assert resolve(named("dim", "heads"), dim=30).embed_dim == 30
    assert resolve(named("dim", "heads"), 30, 5).num_heads == 5
    assert resolve(named("dim", "heads"), num_heads=8).embed_dim == 40  # H = D would hide mistakes
    assert resolve(named("dim", "heads"), embed_dim=9).num_heads != 3


def test_a_configuration_answers_to_every_name() -> None:
    class ByAttribute(Attention):
        def __init__(self, config) -> None:
            self.build(config.n_embd, config.n_head, getattr(config, "flavour", False))

    class ByKey(Attention):
        def __init__(self, cfg) -> None:
            self.build(cfg["emb_dim"], cfg["n_heads"], cfg.get("flavour", True))
            assert "context_length" in cfg
            assert "flavour" not in cfg

    class Asking(Attention):
        def __init__(self, config) -> None:
            self.build(config.n_embd, vars(config.flavour)["heads"])

    for layer in (ByAttribute, ByKey):
        subject = resolve(layer)
        assert (subject.embed_dim, subject.num_heads) == (24, 3)
        assert resolve(layer, num_heads=4).num_heads == 4
    assert "n_embd=24" in resolve(ByAttribute).name
    with pytest.raises(ValueError, match=r"config field flavour .* give it: .*flavour=…"):
        resolve(Asking)
    flavour = SimpleNamespace(heads=3)
    assert resolve(Asking, flavour=flavour, num_heads=3).embed_dim == 24
    mine = {"emb_dim": 30, "n_heads": 5, "context_length": 4}
    subject = resolve(ByKey, cfg=mine)
    assert (subject.embed_dim, subject.num_heads, subject.context_length) == (30, 5, 4)


def test_an_annotated_configuration_is_built() -> None:
    @dataclasses.dataclass
    class Options:
        n_embd: int = 768
        n_head: int = 12
        bias: bool = False

    class Typed(Attention):
        def __init__(self, config: Options) -> None:
            assert isinstance(config, Options)
            self.build(config.n_embd, config.n_head, config.bias)

    Typed.__init__.__annotations__["config"] = Options
    subject = resolve(Typed)
    assert (subject.embed_dim, subject.num_heads) == (24, 3)
    assert isinstance(subject.module, Typed)
    assert subject.module.to_q.bias is None  # a default that nobody overrides stays


def test_a_config_copies_and_knows_what_it_was_asked() -> None:
    config = Config(BuildSizes(24, 3), {"flavour": "dark"})
    assert config.flavour == config["flavour"] == "dark"
    assert dict(config) == {"flavour": "dark"}
    with pytest.raises(AttributeError, match="no field 'taste'"):
        config.taste  # noqa: B018


def test_what_cannot_be_worked_out_is_asked_for_once_by_name() -> None:
    class Named(Attention):
        def __init__(self, k: int, heads: int, flavour: dict[str, int]) -> None:
            self.build(int(k), heads * flavour["dark"])

    with pytest.raises(ValueError, match="cannot be worked out") as error:
        check(Named)
    said = str(error.value)
    assert "arguments k, flavour cannot be worked out" in said
    assert "hw.check(Named, k=…, flavour=…)" in said
    assert "--k … --flavour …" in said
    assert check(Named, k=24, heads=3, flavour={"dark": 1}).passed


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: check(named("dim", "heads"), flavour=1), "no argument flavour; it has dim, heads"),
        (lambda: check(nn.MultiheadAttention(24, 3), dropout=0.5), "built already"),
        (lambda: check(3), "this is a int; give a module"),
        (lambda: check(nn.Module()), "embed_dim=24"),
        (lambda: explain("colour"), "no such rule; known are"),
        (lambda: explain("head-splitt"), "did you mean head-split"),
        (lambda: check(nn.MultiheadAttention(24, 3, device="meta")), "have no numbers"),
        (
            lambda: check(nn.MultiheadAttention(24, 3, kdim=10, vdim=10, batch_first=True)),
            r"keys are 10 wide .* call=lambda layer, x: layer\(x, x\[..., :10\], x\[..., :10\]\)",
        ),
        (lambda: check(MultiHeadAttention(24, 3, kv_dim=10)), r"layer\(x, x\[..., :10\]\)"),
    ],
)
def test_faults_of_the_caller_are_answered_in_words(call: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        call()


def test_a_call_that_wants_more_is_asked_for() -> None:
    class Wanting(Attention):
        def __init__(self, dim: int, heads: int) -> None:
            self.build(dim, heads)

        def forward(self, x: Tensor, flavour: str) -> Tensor:  # type: ignore[override]
            assert flavour == "dark"
            return self.attend(x)

    with pytest.raises(ValueError, match=r"wants for flavour .* call=lambda layer, x: layer\(x, "):
        check(Wanting)
    assert check(Wanting, call=lambda layer, x: layer(x, flavour="dark")).passed
    assert check(Wanting(24, 3), call=lambda layer, x: layer(x, "dark")).passed


# --- instances, functions, layouts ----------------------------------------------------------------


def test_an_instance_needs_nothing_else() -> None:
    layer = MultiHeadAttn(d_in=20, d_out=30, context_length=5, dropout=0.1, num_heads=5)
    subject = resolve(layer)
    sizes = (subject.embed_dim, subject.out_dim, subject.num_heads, subject.context_length)
    assert sizes == (20, 30, 5, 5)
    assert check(layer, embed_dim=20, num_heads=5, causal=True).passed
    assert resolve(CausalAttention(6, 4, 9, 0.0)).num_heads == 1


def test_layers_of_other_dtypes_and_compiled_ones() -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        assert check(nn.MultiheadAttention(24, 3, dtype=dtype)).passed
    compiled = torch.compile(MultiHeadAttention(24, 3), backend="eager")
    assert check(compiled).subject == "MultiHeadAttention(…)"  # what was compiled, not run
    frozen = MultiHeadAttention(24, 3).requires_grad_(False)
    assert check(frozen)["gradients"].severity == "skipped"


def test_what_is_no_attention_is_told_so() -> None:
    assert [one.rule for one in check(nn.Linear(24, 24)).errors] == ["past-used"]
    around = nn.TransformerEncoderLayer(24, 3, 48, batch_first=True)
    assert check(around).passed  # attention with more around it


def test_a_layer_of_two_widths_is_called_by_hand() -> None:
    layer = nn.MultiheadAttention(24, 3, kdim=10, vdim=10, batch_first=True)
    assert check(layer, call=lambda own, x: own(x, x[..., :10], x[..., :10])).passed


def test_what_is_given_is_not_touched() -> None:
    layer = MultiHeadAttn(24, 24, 9, dropout=0.1, num_heads=3).train()
    before = {name: value.clone() for name, value in layer.state_dict().items()}
    attributes, random = set(vars(layer)), torch.get_rng_state()
    check(layer)
    assert layer.training
    assert set(vars(layer)) == attributes
    assert all(torch.equal(before[name], value) for name, value in layer.state_dict().items())
    assert all(parameter.grad is None for parameter in layer.parameters())
    assert torch.equal(torch.get_rng_state(), random)


def test_it_works_without_gradients_around_it() -> None:
    layer = MultiHeadAttention(24, 3)
    for mode in (torch.no_grad(), torch.inference_mode()):
        with mode:
            assert check(layer).passed


def test_a_layer_that_cannot_be_copied_deeply_is_checked_too() -> None:
    layer = MultiHeadAttn(24, 24, 9, 0.0, num_heads=3)
    layer.kept = layer(torch.randn(1, 3, 24))  # type: ignore[assignment]  # part of a graph
    weight = layer.W_query.weight.clone()
    assert check(layer).passed
    assert torch.equal(layer.W_query.weight, weight)


@pytest.mark.parametrize("batch_first", [True, False])
def test_the_layout_is_found(batch_first: bool) -> None:
    subject = resolve(nn.MultiheadAttention(24, 3, batch_first=batch_first))
    assert subject.caller.layout is (USUAL if batch_first else TIME_FIRST)

    class TimeFirst(Attention):
        def __init__(self, dim: int, heads: int) -> None:
            self.build(dim, heads)

        def forward(self, x: Tensor) -> Tensor:
            return self.attend(x.transpose(0, 1)).transpose(0, 1)

    turned = resolve(TimeFirst)
    assert turned.caller.layout is TIME_FIRST
    assert turned.causal
    assert any("[T, B, E]" in note for note in turned.notes)


def test_one_sequence_at_a_time_is_found() -> None:
    class Single(nn.Module):
        def __init__(self, d_in: int, d_out: int) -> None:
            super().__init__()
            self.q, self.k, self.v = (nn.Linear(d_in, d_out) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            tokens, _ = x.shape
            weights = torch.softmax(self.q(x) @ self.k(x).T / self.k.out_features**0.5, dim=-1)
            return weights[:, :tokens] @ self.v(x)

    subject = resolve(Single)
    assert subject.caller.layout is SINGLE
    assert check(Single).passed


def heads_first(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5
    if mask is not None:
        scores = scores.masked_fill(mask, -torch.inf)
    return torch.softmax(scores, dim=-1) @ v


def tokens_first(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return heads_first(
        query.mT.mT.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    ).transpose(1, 2)


def three_axes(Q: Tensor, K: Tensor, V: Tensor) -> Tensor:
    return torch.bmm(torch.softmax(torch.bmm(Q, K.mT) / K.shape[2] ** 0.5, 2), V)


@pytest.mark.parametrize(
    ("function", "axes"),
    [
        (heads_first, "heads"),
        (tokens_first, "tokens"),
        (three_axes, "flat"),
        (lambda q, k, v: torch.softmax(q @ k.t() / k.shape[1] ** 0.5, 1) @ v, "single"),
        (F.scaled_dot_product_attention, "heads"),
        (functools.partial(F.scaled_dot_product_attention, is_causal=True), "heads"),
    ],
)
def test_functions_of_q_k_and_v(function: Any, axes: str) -> None:
    subject = resolve(function)
    assert subject.axes == axes
    assert subject.projections is not None
    assert check(function).passed


def test_a_function_of_x_and_an_object_with_a_call() -> None:
    layer = MultiHeadAttn(24, 24, 16, 0.0, num_heads=3)
    assert check(lambda x: layer(x), embed_dim=24).passed

    class Plain:
        embed_dim, num_heads = 24, 3

        def __call__(self, x: Tensor) -> Tensor:
            return layer(x)

    assert check(Plain(), embed_dim=24).passed


def test_masks_are_passed_as_they_are_understood() -> None:
    hidden = resolve(heads_first)
    assert hidden.mask_form is not None
    assert hidden.mask_form.kind == "hidden"
    assert hidden.causal_from == "mask"
    assert "True where a key is hidden" in hidden.notes[-1]
    plain = resolve(heads_first, causal=False)
    assert (plain.causal, plain.mask_form) == (False, None)

    class Insisting(Attention):
        def __init__(self, dim: int, heads: int) -> None:
            self.build(dim, heads)

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:  # type: ignore[override]
            q, k, v = (
                part(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
                for part in (self.to_q, self.to_k, self.to_v)
            )
            return self.to_out(heads_first(q, k, v, ~(mask > 0)).transpose(1, 2).flatten(2))

    for causal in (None, True, False):
        assert check(Insisting, causal=causal).passed


def test_causality_is_seen_named_or_unknown() -> None:
    class Leaking(Attention):
        def __init__(self, dim: int, heads: int) -> None:
            self.build(dim, heads)

        def forward(self, x: Tensor) -> Tensor:
            return self.attend(x, causal=False)

    class CausalLeaking(Leaking):
        pass

    assert resolve(named("dim", "heads")).causal_from == "seen"
    assert resolve(Leaking).causal_from == "unknown"
    assert resolve(CausalLeaking).causal_from == "named"
    assert check(Leaking).passed
    assert not check(Leaking, causal=True).passed
    assert not check(CausalLeaking).passed
    assert "causal=True" in check(Leaking)["causality"].message


# --- verdicts -------------------------------------------------------------------------------------


def test_the_notebooks_attention_gets_exactly_two_findings() -> None:
    verdict = check(NotebookCausalAttention, faithful=True)
    assert [one.severity for one in verdict.findings] == ["error", "warning"]
    scale, weights = verdict.findings
    assert "root of the sequence length" in scale.message
    assert "keys.shape[-1]" in scale.hint
    assert scale.example is not None
    assert weights.rule == "init"
    assert "torch.rand" in weights.message
    assert not verdict.passed
    assert verdict["prefix"].explained_by == scale.rule
    assert check(NotebookCausalAttention).passed


def test_what_cannot_be_built_or_called_ends_in_a_verdict() -> None:
    class Unbuilt(nn.Module):
        def __init__(self, dim: int) -> None:
            super().__init__()
            self.width = dimension  # type: ignore[name-defined]

    class Uncalled(Attention):
        def __init__(self, dim: int, heads: int) -> None:
            self.build(dim, heads)

        def forward(self, x: Tensor) -> Tensor:
            return self.to_q(x) @ self.to_k(x)

    verdict = check(Unbuilt)
    assert [one.rule for one in verdict.findings] == ["builds"]
    assert "name 'dimension' is not defined" in verdict.findings[0].message
    assert "test_check.py: `self.width = dimension" in verdict.findings[0].message
    verdict = check(Uncalled)
    assert [one.rule for one in verdict.findings] == ["runs"]
    assert "self.to_q(x) @ self.to_k(x)" in verdict.findings[0].message
    assert verdict.findings[0].hint
    with pytest.raises(Broken):
        resolve(Uncalled)


def test_a_verdict_survives_json() -> None:
    verdict = check(NotebookCausalAttention, faithful=True)
    text = verdict.to_json()
    again = Verdict.from_json(text)
    assert again == verdict
    data = json.loads(text)
    assert data["passed"] is False
    assert [one["rule"] for one in data["findings"]] == ["scale", "init"]
    assert {"rule", "severity", "message", "hint", "example"} <= set(data["findings"][0])
    odd = Example("x", [[math.nan, 1.0]], [[math.inf, 1.0]], "token 0")
    json.loads(Verdict("f", (Finding("finite", "error", "NaN", example=odd),)).to_json())


def test_a_verdict_prints_itself() -> None:
    text = str(check(NotebookCausalAttention, faithful=True))
    assert text.startswith("NotebookCausalAttention(dim=24,")
    assert "not right yet (1 ❌, 1 ⚠, " in text
    assert "❌ scale: " in text
    assert "What to change: " in text
    assert "torch.manual_seed(0); x = torch.randn(1, 3, 24, dtype=torch.float64)" in text
    assert "↳ prefix: " in text
    assert "✅ batch: " in text
    console = Console(width=300, record=True, file=io.StringIO())
    console.print(check(MultiHeadAttn))
    assert "right, with advice" in console.export_text()


def test_an_example_can_be_typed_in() -> None:
    example = check(NotebookCausalAttention, faithful=True)["scale"].example
    assert example is not None
    assert "random weights" not in example.source  # these are the layer's own
    space: dict[str, Any] = {"torch": torch}
    exec(example.source, space)
    torch.manual_seed(0)
    layer = NotebookCausalAttention(24, 16, 0.0, faithful=True).double().eval()
    found = torch.tensor(example.actual, dtype=torch.float64)
    assert torch.allclose(layer(space["x"])[0], found, atol=1e-9)
    assert len(example.actual) == 3


def test_unknown_rules_are_named_with_the_known_ones() -> None:
    verdict = check(MultiHeadAttention, embed_dim=24, num_heads=3)
    with pytest.raises(KeyError, match="'colour' was not tried here; tried were"):
        verdict["colour"]
    assert verdict["batch"].severity == "passed"


def test_every_rule_that_is_used_is_explained() -> None:
    for thing in (MultiHeadAttn, NotebookCausalAttention, heads_first, nn.MultiheadAttention):
        for one in check(thing).results:
            assert one.rule in RULES
            assert explain(one.rule).startswith(f"{one.rule}: ")


def test_small_advice_waits_until_nothing_is_wrong() -> None:
    assert check(MultiHeadAttn)["buffer"].severity == "warning"
    assert check(NotebookCausalAttention, faithful=True)["buffer"].severity == "skipped"


def test_a_rule_that_cannot_be_tried_has_not_passed() -> None:
    """A function has no constructor to refuse sizes, and saves nothing."""
    verdict = check(heads_first)
    assert not {"assert", "buffer"} & {one.rule for one in verdict.results}
    assert "buffer" not in str(verdict)
    assert check(NotebookCausalAttention)["assert"].severity == "passed"


def test_the_same_seed_gives_the_same_verdict() -> None:
    assert check(MultiHeadAttn, seed=3) == check(MultiHeadAttn, seed=3)


def test_a_check_makes_so_many_calls() -> None:
    """What takes a check's time: 156 calls on 3,676 tokens in all when this was written."""
    tokens: list[int] = []

    class Counted(MultiHeadAttn):
        def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
            tokens.append(x.shape[:-1].numel())
            return super().forward(x, *args, **kwargs)

    assert check(Counted, 768, 768, 256, 0.1, 12).passed
    assert len(tokens) < 250
    assert sum(tokens) < 6000


# --- the pytest helper ----------------------------------------------------------------------------


def test_the_helper_passes_and_fails_with_the_same_words() -> None:
    verdict = assert_attention(MultiHeadAttn, embed_dim=24, num_heads=3, causal=True)
    assert [one.rule for one in verdict.warnings] == ["buffer"]
    with pytest.raises(AssertionError) as failure:
        assert_attention(NotebookCausalAttention, faithful=True)
    wrong = check(NotebookCausalAttention, faithful=True)
    assert str(wrong.errors[0]) in str(failure.value)
    assert wrong.summary() in str(failure.value)


def test_the_public_names() -> None:
    assert hw.check is check
    assert hw.Verdict is Verdict
