"""How a layer is built and called: what names tell, what is asked, and calls that are shown."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from authored import loaded
from headwise.check import check, explain
from headwise.check.build import Config, Request, Sizes, resolve
from headwise.check.call import KEYS, SHAPES, Form
from headwise.check.masks import learn_causality, learn_forms
from headwise.check.names import building_role, calling_role
from headwise.check.target import Target
from headwise.layers.attention import MultiHeadAttention
from headwise.systems.split import MultiHeadAttn


class Attention(nn.Module):
    """Right; subclasses name its sizes, and what its call takes, as people do."""

    def __init__(self, dim: int, heads: int) -> None:
        self.build(dim, heads)

    def build(self, width: int, heads: int, bias: bool = True) -> None:
        super().__init__()
        self.heads = heads
        self.q_proj = nn.Linear(width, width, bias=bias)
        self.k_proj = nn.Linear(width, width, bias=bias)
        self.v_proj = nn.Linear(width, width, bias=bias)
        self.out = nn.Linear(width, width, bias=bias)

    def split(self, rows: Tensor) -> Tensor:
        return rows.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def attend(
        self,
        x: Tensor,
        hide: Callable[[Tensor], Tensor] = lambda scores: scores,
        memory: Tensor | None = None,
    ) -> Tensor:
        keys = x if memory is None else memory
        q, k, v = self.split(self.q_proj(x)), self.split(self.k_proj(keys)), self.v_proj(keys)
        weights = torch.softmax(hide(q @ k.mT / q.shape[-1] ** 0.5), dim=-1)
        return self.out((weights @ self.split(v)).transpose(1, 2).flatten(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.attend(x, causal)


def causal(scores: Tensor) -> Tensor:
    tokens, keys = scores.shape[-2:]
    ones = torch.ones(tokens, keys, dtype=torch.bool, device=scores.device)
    return scores.masked_fill(ones.triu(1 + keys - tokens), -torch.inf)


def target_of(
    thing: Any, *args: Any, wrong: bool = False, call: Any = None, **arguments: Any
) -> Target:
    """Return the target with what is learned of its call."""
    names = ("embed_dim", "num_heads", "num_kv_heads", "causal")
    sizes = Sizes(**{name: arguments.pop(name, None) for name in names})
    target = resolve(thing, args, arguments, Request(sizes, 0, call))
    findings = learn_forms(target)
    assert bool(findings) == wrong, findings
    learn_causality(target, wrong)
    return target


# ---- arguments of constructors -------------------------------------------------------------------


def named(*names: str) -> type[Attention]:
    """Return a class whose constructor has these arguments: width, heads, and others."""
    space: dict[str, Any] = {"Attention": Attention}
    exec(
        f"class Named(Attention):\n"
        f"    def __init__(self, {', '.join(names)}):\n"
        f"        self.build({names[0]}, {names[1]})",
        space,
    )
    return space["Named"]


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
def test_arguments_are_known_by_their_names(names: tuple[str, ...]) -> None:
    target = target_of(named(*names))
    assert (target.embed_dim, target.num_heads, target.out_dim) == (24, 3, 24)
    assert target.causal
    given = target_of(named(*names), embed_dim=20, num_heads=4)
    assert (given.embed_dim, given.num_heads) == (20, 4)


def test_names_without_a_role_have_none() -> None:
    assert building_role("color") is None
    assert building_role("_N_Embd") == "width"
    assert calling_role("x") is None
    assert calling_role("KEY_PADDING_MASK") == "padding"
    assert calling_role("valid_lens") == calling_role("src_lengths") == "lengths"


def test_sizes_that_are_given_are_kept() -> None:
    assert target_of(named("dim", "heads"), dim=30).embed_dim == 30
    assert target_of(named("dim", "heads"), 30, 5).num_heads == 5
    assert target_of(named("dim", "heads"), num_heads=8).embed_dim == 40  # H = D hides mistakes
    assert target_of(named("dim", "heads"), embed_dim=9).num_heads != 3


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
            self.build(config.n_embd, config.flavour.heads)

    for layer in (ByAttribute, ByKey):
        target = target_of(layer)
        assert (target.embed_dim, target.num_heads) == (24, 3)
        assert target_of(layer, num_heads=4).num_heads == 4
    with pytest.raises(ValueError, match=r"configuration needs `flavour`.*--flavour …"):
        check(Asking)
    assert target_of(Asking, flavour=SimpleNamespace(heads=3), num_heads=3).embed_dim == 24
    target = target_of(ByKey, cfg={"emb_dim": 30, "n_heads": 5, "context_length": 4})
    assert (target.embed_dim, target.num_heads, target.context_length) == (30, 5, 4)


def test_a_configuration_of_a_class_is_built() -> None:
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
    target = target_of(Typed)
    assert (target.embed_dim, target.num_heads) == (24, 3)
    assert target.layer.q_proj.bias is None  # a default that nobody overrides stays


def test_a_configuration_says_what_it_lacks() -> None:
    config = Config(Sizes(24, 3), {"flavour": "dark"})
    assert config.flavour == config["flavour"] == "dark"
    assert dict(config) == {"flavour": "dark"}
    with pytest.raises(AttributeError, match="no field 'taste'"):
        config.taste  # noqa: B018


def test_what_is_not_guessed_is_asked_for_once_by_name() -> None:
    class Odd(Attention):
        def __init__(self, k: int, heads: int, flavour: dict[str, int]) -> None:
            self.build(int(k), heads * flavour["dark"])

    with pytest.raises(ValueError, match="which cannot be guessed") as error:
        check(Odd)
    said = str(error.value)
    assert "the constructor takes k, flavour" in said
    assert "hw.check(Odd, k=…, flavour=…)" in said
    assert "--k … --flavour …" in said
    assert check(Odd, k=24, heads=3, flavour={"dark": 1}).passed


def test_sizes_that_a_constructor_refuses_come_first() -> None:
    class Strict(Attention):
        def __init__(self, dim: int, heads: int) -> None:
            if dim % heads:
                raise ValueError(f"dim={dim} is no multiple of heads={heads}")
            self.build(dim, heads)

    with pytest.raises(ValueError, match=r"Strict\(dim=24, heads=5\) fails: .*no multiple"):
        check(Strict, dim=24, heads=5)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: check(named("dim", "heads"), foo=3), "no argument foo; it has dim, heads"),
        (lambda: check(nn.MultiheadAttention(24, 3), dropout=0.5), "this is an instance"),
        (lambda: check(3), "must be a module, a class"),
        (lambda: check(nn.Module()), "embed_dim=24"),
        (lambda: explain("color"), "no such rule; rules: "),
        (lambda: explain("head-splitt"), "did you mean head-split"),
        (lambda: check(nn.MultiheadAttention(24, 3, device="meta")), "have no values"),
        (lambda: check(F.scaled_dot_product_attention, color=3), "no argument color|color"),
    ],
)
def test_faults_of_the_caller_are_answered_in_words(call: Any, words: str) -> None:
    with pytest.raises((ValueError, AssertionError), match=words):
        call()


# ---- instances, functions, layouts ---------------------------------------------------------------


def test_an_instance_needs_nothing_else() -> None:
    layer = MultiHeadAttn(d_in=20, d_out=30, context_length=5, dropout=0.1, num_heads=5)
    target = target_of(layer)
    sizes = (target.embed_dim, target.out_dim, target.num_heads, target.context_length)
    assert sizes == (20, 30, 5, 5)
    assert check(layer, embed_dim=20, num_heads=5, causal=True).passed


def test_layers_of_other_dtypes_and_compiled_ones() -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        assert check(nn.MultiheadAttention(24, 3, dtype=dtype)).passed
    compiled = torch.compile(MultiHeadAttention(24, 3), backend="eager")
    assert check(compiled).subject == "MultiHeadAttention(…)"  # what was compiled, not run
    frozen = MultiHeadAttention(24, 3).requires_grad_(False)
    assert check(frozen)["gradients"].severity == "skipped"


def test_a_layer_of_two_widths_is_called_by_hand() -> None:
    layer = nn.MultiheadAttention(24, 3, kdim=10, vdim=10, batch_first=True)
    with pytest.raises(ValueError, match="--call"):
        check(layer)
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


class TimeFirst(Attention):
    def forward(self, x: Tensor) -> Tensor:
        T, B, _ = x.shape
        return self.attend(x.transpose(0, 1), causal).transpose(0, 1).reshape(T, B, -1)


class TimeFirstByEinsum(TimeFirst):
    def forward(self, x: Tensor) -> Tensor:
        x = torch.einsum("tbe,ef->btf", x, torch.eye(x.shape[2], dtype=x.dtype, device=x.device))
        return self.attend(x, causal).transpose(0, 1)


class TokensCounted(Attention):
    def forward(self, hidden: Tensor) -> Tensor:
        seq_len = hidden.size(0)
        return self.attend(hidden[:seq_len].transpose(0, 1), causal).transpose(0, 1)


@pytest.mark.parametrize(
    "thing",
    [nn.MultiheadAttention(24, 3), TimeFirst, TimeFirstByEinsum, TokensCounted],
    ids=lambda thing: getattr(thing, "__name__", "torch"),
)
def test_time_may_come_first(thing: Any) -> None:
    assert target_of(thing).call.time_first
    verdict = check(thing)
    assert verdict.passed, str(verdict)
    assert verdict["batch"].severity == "passed"


def test_a_batch_that_comes_first_is_left_there() -> None:
    assert not target_of(nn.MultiheadAttention(24, 3, batch_first=True)).call.time_first
    assert not target_of(Attention).call.time_first


def heads_first(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5
    if mask is not None:
        scores = scores.masked_fill(mask, -torch.inf)
    return torch.softmax(scores, dim=-1) @ v


def tokens_first(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    q, k, v = (one.transpose(1, 2) for one in (query, key, value))
    return heads_first(q, k, v).transpose(1, 2)


def three_axes(Q: Tensor, K: Tensor, V: Tensor) -> Tensor:
    return torch.bmm(torch.softmax(torch.bmm(Q, K.mT) / K.shape[2] ** 0.5, 2), V)


class OfQKV(nn.Module):
    """Without weights of its own."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return heads_first(q, k, v)


@pytest.mark.parametrize(
    ("function", "axes"),
    [
        (heads_first, "[B, H, T, D]"),
        (tokens_first, "[B, T, H, D]"),
        (three_axes, "[B, T, D]"),
        (F.scaled_dot_product_attention, "[B, H, T, D]"),
        (functools.partial(F.scaled_dot_product_attention, is_causal=True), "[B, H, T, D]"),
        (OfQKV(), "[B, H, T, D]"),
        (OfQKV, "[B, H, T, D]"),
    ],
)
def test_functions_of_q_k_and_v(function: Any, axes: str) -> None:
    verdict = check(function)
    assert verdict.passed, str(verdict)
    assert f"q, k and v {axes}" in verdict.notes


def test_functions_that_fail_are_asked_about() -> None:
    def crossed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.softmax(q @ k, dim=-1) @ v

    def summed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (torch.softmax(q @ k.mT, dim=-1) @ v).sum(-1).sum(-1)

    with pytest.raises(ValueError, match=r"fix line \d+, `return torch.softmax\(q @ k, dim=-1\)"):
        check(crossed)
    with pytest.raises(
        ValueError, match=r"returns a tensor of shape \[.*an output must be \[B, T, out"
    ):
        check(summed)


# ---- the first call ------------------------------------------------------------------------------


def test_a_first_call_that_fails_is_a_question() -> None:
    class Uncalled(Attention):
        def forward(self, x: Tensor) -> Tensor:
            return self.q_proj(x) @ self.k_proj(x)

    with pytest.raises(ValueError, match=r"If this call is the right one, fix line \d+") as error:
        check(Uncalled)
    assert "self.q_proj(x) @ self.k_proj(x)" in str(error.value)
    assert "RuntimeError" in str(error.value)
    assert '--call "lambda layer, x: layer(x)"' in str(error.value)
    shown = check(Uncalled, call=lambda layer, x: layer(x))
    assert [one.rule for one in shown.errors] == ["runs"]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("return self.out(mixed)", "NameError: name 'mixed' is not defined"),
        ("return self.ouut(x)", "has no attribute 'ouut'; did you mean `out`?"),
    ],
)
def test_a_name_that_is_missing_is_a_mistake(line: str, says: str, tmp_path: Path) -> None:
    text = (
        "from torch import nn\nclass A(nn.Module):\n    def __init__(self, dim, heads):\n"
        "        super().__init__()\n        self.out = nn.Linear(dim, dim)\n"
        f"    def forward(self, x):\n        {line}\n"
    )
    thing, _ = loaded(text, tmp_path)
    (one,) = check(thing).errors
    assert one.rule == "runs"
    assert says in one.message
    assert f"line 7, `{line}`" in one.message


def test_what_cannot_be_built_ends_in_a_verdict() -> None:
    class Unbuilt(nn.Module):
        def __init__(self, dim: int) -> None:
            super().__init__()
            self.width = dimension  # type: ignore[name-defined]

    class Bare(nn.Module):
        def __init__(self, dim: int, heads: int) -> None:
            super().__init__()
            self.out = nn.Linear(dim, dim)

    (one,) = check(Unbuilt).errors
    assert one.rule == "builds"
    assert "name 'dimension' is not defined" in one.message
    assert "`self.width = dimension" in one.message
    assert [one.rule for one in check(lambda dim, heads: 3).errors] == ["builds"]
    (one,) = check(Bare, embed_dim=24, num_heads=3, call=lambda layer, x: layer(x)).errors
    assert one.rule == "runs"


def test_a_call_that_needs_more_is_asked_for() -> None:
    class Wanting(Attention):
        def forward(self, x: Tensor, flavour: str) -> Tensor:  # type: ignore[override]
            assert flavour == "dark"
            return self.attend(x, causal)

    with pytest.raises(ValueError, match="It takes `flavour`, which cannot be guessed") as error:
        check(Wanting)
    said = str(error.value)
    assert '--call "lambda layer, x: layer(x, …)"' in said
    for word in ("memory [B, S, E]", "keep [B, S]", "allow [T, S]", "start, ", "past, "):
        assert word in said
    assert said.endswith("Only the named inputs are tested.")
    assert check(Wanting, call=lambda layer, x: layer(x, flavour="dark")).passed
    assert check(Wanting(24, 3), call=lambda layer, x: layer(x, "dark")).passed


QUESTIONS = {
    "x, enc, src_mask": "lambda layer, x, memory, keep: layer(x, memory, keep)",
    "x, freqs_cis": "lambda layer, x: layer(x, …)",
    "x, freqs, start_pos": "lambda layer, x, start: layer(x, …, start)",
    "x, memory, encoder_mask": "lambda layer, x, memory, keep: layer(x, memory, keep)",
}


@pytest.mark.parametrize("arguments", QUESTIONS)
def test_the_lambda_to_copy_has_its_names(arguments: str) -> None:
    space: dict[str, Any] = {"Attention": Attention}
    exec(
        f"class A(Attention):\n    def forward(self, {arguments}):\n        raise TypeError", space
    )
    with pytest.raises(ValueError, match="Show one call") as error:
        check(space["A"])
    assert QUESTIONS[arguments] in str(error.value)


# ---- forms of masks in a plain call --------------------------------------------------------------

UNDERSTOOD: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "may": lambda scores, mask: scores.masked_fill(~mask, -torch.inf),
    "hidden": lambda scores, mask: scores.masked_fill(mask, -torch.inf),
    "added": lambda scores, mask: scores + mask,
    "ones": lambda scores, mask: scores.masked_fill(mask < 0.5, -torch.inf),
    "zeros": lambda scores, mask: scores.masked_fill(mask > 0.5, -torch.inf),
}
SAYS = {
    "may": "True = may attend",
    "hidden": "True = hidden",
    "added": "0 or −inf, added to the scores",
    "ones": "1 = may attend",
    "zeros": "1 = hidden",
}
BROADCAST: dict[str, Callable[[Tensor], Tensor]] = {
    "[T, S]": lambda mask: mask[None, None],
    "[1, 1, T, S]": lambda mask: mask,
    "[B, 1, T, S]": lambda mask: mask,
    "[B, T, S]": lambda mask: mask[:, None],
    "[B, S]": lambda mask: mask[:, None, None],
    "[B, 1, S]": lambda mask: mask[:, None],
    "[B, 1, 1, S]": lambda mask: mask,
}
AXES = {"[T, S]": 2, "[B, T, S]": 3, "[B, S]": 2, "[B, 1, S]": 3}


def masked(kind: str, shape: str, argument: str, *more: str) -> type[Attention]:
    """Return a layer that understands its mask in one form only."""

    def take_mask(scores: Tensor, mask: Tensor | None) -> Tensor:
        if mask is None:
            return scores
        if (mask.dtype == torch.bool) != (kind in ("may", "hidden")):
            raise TypeError(f"the mask is {mask.dtype}")
        if mask.ndim != AXES.get(shape, 4) or (shape == "[B, 1, S]" and mask.shape[1] != 1):
            raise ValueError(f"the mask has {mask.ndim} axes")
        if shape == "[1, 1, T, S]" and len(mask) != 1:
            raise ValueError("one mask for all")
        return UNDERSTOOD[kind](scores, BROADCAST[shape](mask))

    space: dict[str, Any] = {"Attention": Attention, "take_mask": take_mask}
    code = f"""class Hiding(Attention):
    def forward(self, x, {argument}=None):
        return self.attend(x, lambda scores: take_mask(scores, {argument}))"""
    exec(code, space)
    return space["Hiding"]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", UNDERSTOOD)
def test_the_form_of_a_mask_is_learned(kind: str, shape: str) -> None:
    target = target_of(masked(kind, shape, "attn_mask"))
    assert (target.causal, target.causal_from) == (True, "mask")
    assert target.observed[0] == "sees all tokens (a causal mask is passed here)"
    (form,) = target.observed[1:]
    assert form == f"attn_mask {shape} ({SAYS[kind]})" or (shape == "[1, 1, T, S]" in form)
    seen = target.double().influence(target.double().input(tokens=5, batch=1))
    assert bool((seen.triu(1) == 0).all())
    assert int((seen.tril() > 0).sum()) == 15


@pytest.mark.parametrize("shape", KEYS)
@pytest.mark.parametrize("kind", UNDERSTOOD)
def test_the_form_of_a_mask_of_padding_is_learned(kind: str, shape: str) -> None:
    target = target_of(masked(kind, shape, "pad_mask"))
    assert target.observed == ["sees all tokens", f"pad_mask {shape} ({SAYS[kind]})"]


def test_a_form_that_is_learned_is_tested_and_stated() -> None:
    verdict = check(masked("hidden", "[B, S]", "key_padding_mask"))
    assert verdict.findings == ()
    assert verdict["padding"].severity == "passed"
    assert "key_padding_mask [B, S] (True = hidden)" in verdict.notes
    verdict = check(masked("may", "[T, S]", "attn_mask"))
    assert verdict.findings == ()
    assert verdict["mask"].severity == verdict["causality"].severity == "passed"
    verdict = check(masked("may", "[B, S]", "key_padding_mask"))  # against PyTorch's custom
    assert [one.rule for one in verdict.warnings] == ["padding"]
    assert "`key_padding_mask` is True for real tokens here" in verdict.warnings[0].message


class Lengths(Attention):
    def forward(self, x: Tensor, valid_lens: Tensor | None) -> Tensor:
        if valid_lens is None:
            return self.attend(x)
        real = torch.arange(x.shape[1], device=x.device) < valid_lens[:, None]
        return self.attend(x, lambda s: s.masked_fill(~real[:, None, None], -1e6))


class Flag(Attention):
    def forward(self, x: Tensor, is_causal: bool = False) -> Tensor:
        return self.attend(x, causal) if is_causal else self.attend(x)


def test_lengths_and_flags_are_passed() -> None:
    verdict = check(Lengths)
    assert verdict.passed, str(verdict)
    assert "valid_lens (number of real tokens)" in verdict.notes
    assert verdict["padding"].severity == "passed"
    target = target_of(Flag)
    assert (target.causal, target.causal_from) == (True, "mask")
    assert not target_of(Flag, causal=False).causal
    assert check(Flag).passed


def test_the_nearest_form_is_taken_where_none_hides_all() -> None:
    class ZeroFill(Attention):
        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            if mask is None:
                return self.attend(x)
            return self.attend(x, lambda s: s.masked_fill(mask == 0, 0.0))

    verdict = check(ZeroFill)
    (one,) = verdict.errors
    assert one.rule in ("mask", "padding")
    assert "a score of 0 hides nothing" in one.hint


def test_a_mask_that_changes_nothing_is_a_mistake() -> None:
    class Ignoring(Attention):
        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            return self.attend(x)

    (one,) = check(Ignoring).errors
    assert (one.rule, one.message) == ("mask", "`mask` changes nothing, whatever it hides.")


def test_a_form_that_is_not_usual_is_asked_for() -> None:
    class Odd(Attention):
        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            if mask is not None and mask.ndim != 5:
                raise ValueError("a mask has five axes here")
            return self.attend(x)

    verdict = check(Odd)
    assert verdict.passed
    assert verdict["mask"].severity == "skipped"
    assert "lambda layer, x, allow: layer(x, mask=allow)" in verdict["mask"].message


def test_forms_make_what_they_say() -> None:
    allowed = torch.tensor([[[True, False], [True, True]]])
    made = {kind: Form("m", kind, "[T, S]").make(allowed, torch.float32) for kind in UNDERSTOOD}
    assert made["may"].tolist() == [[True, False], [True, True]]
    assert made["hidden"].tolist() == [[False, True], [False, False]]
    assert made["added"].tolist() == [[0, -torch.inf], [0, 0]]
    assert made["ones"].tolist() == [[1, 0], [1, 1]]
    assert made["zeros"].tolist() == [[0, 1], [0, 0]]
    assert Form("m", "flag").make(allowed, torch.float32) is True
    assert Form("m", "lengths").make(allowed[:, 0], torch.float32).tolist() == [1]
    assert str(Form("is_causal", "flag")) == "is_causal (True = causal)"


# ---- causality -----------------------------------------------------------------------------------


class Leaking(Attention):
    def forward(self, x: Tensor) -> Tensor:
        return self.attend(x)


class CausalLeaking(Leaking):
    pass


class NonCausalAttention(Leaking):
    pass


class MaskedAttention(Leaking):
    pass


class LeakingWithTable(Leaking):
    def __init__(self, dim: int, heads: int, block_size: int = 16) -> None:
        super().__init__(dim, heads)
        self.register_buffer("mask", torch.tril(torch.ones(block_size, block_size)))


class LeakingByFlag(Leaking):
    def __init__(self, dim: int, heads: int, causal: bool = True) -> None:
        super().__init__(dim, heads)


def test_causality_is_seen_named_or_unknown() -> None:
    assert target_of(Attention).causal_from == "seen"
    for layer in (Leaking, NonCausalAttention, MaskedAttention):
        assert target_of(layer).causal_from == "unknown"
    for layer in (CausalLeaking, LeakingWithTable):
        assert target_of(layer).causal_from == "named"
    assert target_of(LeakingByFlag, causal=True).causal_from in ("given", "named")
    verdict = check(Leaking)
    assert verdict.passed
    assert verdict.notes[0] == "sees all tokens"
    assert "causality" not in {one.rule for one in verdict.results}
    for wrong in (check(Leaking, causal=True), check(CausalLeaking), check(LeakingWithTable)):
        assert wrong.errors[0].rule == "causal-mask", str(wrong)
        assert wrong["causality"].explained_by == "causal-mask"
    assert check(CausalLeaking, causal=False).passed


# ---- shown calls ---------------------------------------------------------------------------------


class Takes(Attention):
    """Takes whatever can be named; `wrong` says what goes wrong with it."""

    wrong = ""

    def forward(
        self,
        x: Tensor,
        table: float,
        memory: Tensor | None = None,
        real: Tensor | None = None,
        allowed: Tensor | None = None,
    ) -> Tensor:
        def hide(scores: Tensor) -> Tensor:
            if real is not None:
                keys = real[:, None, :, None] if self.wrong == "queries" else real[:, None, None]
                keys = ~keys if self.wrong == "inverted" else keys
                keys = keys.flip(0) if self.wrong == "elsewhere" else keys
                fill = -1e-9 if self.wrong == "small" else -1e9
                scores = scores if self.wrong == "ignored" else scores.masked_fill(~keys, fill)
            if allowed is not None:
                pairs = allowed.T if self.wrong == "queries" else allowed
                pairs = ~pairs if self.wrong == "inverted" else pairs
                fill = -1e-9 if self.wrong == "small" else -torch.inf
                scores = scores if self.wrong == "ignored" else scores.masked_fill(~pairs, fill)
            return scores

        if self.wrong == "ignored memory":
            memory = None if memory is None else x[:, : memory.shape[1]]
        return self.attend(x * table, hide, memory)


SHOWN: dict[str, Callable[..., Any]] = {
    "padding": lambda layer, x, keep: layer(x, 1.0, real=keep),
    "mask": lambda layer, x, allow: layer(x, 1.0, allowed=allow),
    "cross": lambda layer, x, memory: layer(x, 1.0, memory),
}


@pytest.mark.parametrize("rule", SHOWN)
def test_what_a_call_names_is_tested(rule: str) -> None:
    verdict = check(Takes, call=SHOWN[rule])
    assert verdict.findings == (), str(verdict)
    assert verdict["definition"].severity == "passed"
    others = {"padding", "mask", "cross", "rotary", "cache"} - {rule}
    assert verdict[rule].severity == "passed"
    assert not others & {one.rule for one in verdict.results}, str(verdict)


@pytest.mark.parametrize("wrong", ["queries", "inverted", "elsewhere", "small", "ignored"])
@pytest.mark.parametrize("rule", ["padding", "mask"])
def test_what_a_call_names_and_is_wrong_is_said(rule: str, wrong: str) -> None:
    if (rule, wrong) == ("mask", "elsewhere"):
        return
    words = {
        "queries": "hides queries instead of keys",
        "inverted": "` is inverted: ",
        "elsewhere": "changes another",
        "small": "keep a share of the weight",
        "ignored": "changes nothing",
    }
    verdict = check(type("Takes", (Takes,), {"wrong": wrong}), call=SHOWN[rule])
    first = verdict.errors[0]
    assert first.rule == rule, str(verdict)
    assert words[wrong] in first.message
    assert ("`keep`" if rule == "padding" else "`allow`") in first.message


def test_another_sequence_that_is_named_and_ignored() -> None:
    layer = type("Takes", (Takes,), {"wrong": "ignored memory"})
    (one,) = check(layer, call=SHOWN["cross"]).errors
    assert one.rule == "cross"


def test_masks_are_tested_with_another_sequence() -> None:
    def call(layer: nn.Module, x: Tensor, memory: Tensor, keep: Tensor) -> Tensor:
        out: Tensor = layer(x, 1.0, memory, keep)
        return out

    verdict = check(Takes, call=call)
    assert verdict.findings == (), str(verdict)
    assert verdict["cross"].severity == verdict["padding"].severity == "passed"
    wrong = check(type("Takes", (Takes,), {"wrong": "inverted"}), call=call)
    assert wrong.errors[0].rule == "padding", str(wrong)


class Past(Attention):
    """Keys and values come back in a dictionary of its own, and positions are counted."""

    restarts = False

    def forward(self, x: Tensor, state: dict[str, Any], first: int) -> dict[str, Any]:
        places = torch.arange(first, first + x.shape[1], device=x.device, dtype=x.dtype)
        if self.restarts:
            places = places - first
        k, v = self.k_proj(x + places[:, None].sin()), self.v_proj(x)
        if state:
            k, v = torch.cat((state["k"], k), 1), torch.cat((state["v"], v), 1)
        q = self.split(self.q_proj(x))
        weights = causal(q @ self.split(k).mT / q.shape[-1] ** 0.5).softmax(-1)
        out = self.out((weights @ self.split(v)).transpose(1, 2).flatten(2))
        return {"out": out, "k": k, "v": v}


@pytest.mark.parametrize("restarts", [False, True])
def test_what_came_back_goes_in_again_as_the_call_shows(restarts: bool) -> None:
    def call(layer: nn.Module, x: Tensor, past: Any, start: int) -> Any:
        return layer(x, past or {}, start)

    layer = type("Past", (Past,), {"restarts": restarts})
    verdict = check(layer, call=call)
    assert verdict["cache"].severity == ("error" if restarts else "passed"), str(verdict)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda layer, x, mask: layer(x), "call= has mask among its parameters"),
        (lambda layer, x, keep, color: layer(x), "call= has color among its parameters"),
        (lambda x: x, "call= has 1 parameters"),
        (lambda layer, x: layer(x, 3), "takes 2 positional arguments but 3 were given"),
        (lambda layer, x: layer(x[:, :, None] @ x), "RuntimeError"),
        (lambda layer, x: layer(x.nothing), "has no attribute 'nothing'"),
        (lambda layer, x: 1 / 0, "division by zero"),
    ],
)
def test_a_call_that_fails_by_itself_is_no_mistake_of_the_layer(
    call: Callable[..., Any], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        check(Attention, 24, 3, call=call)


def test_the_names_of_a_call_are_listed() -> None:
    with pytest.raises(ValueError, match="any of memory, keep, allow, start, past"):
        check(Attention, call=lambda layer, x, mask: layer(x))


def test_a_layer_that_fails_in_the_call_that_is_shown_is_at_fault() -> None:
    (one,) = check(Takes, 24, 3, call=lambda layer, x: layer(x, "table")).errors
    assert one.rule == "runs"
    assert "self.attend(x * table, hide, memory)" in one.message
    (one,) = check(Attention, 24, 3, call=lambda layer, x: layer(x)[..., 0]).errors
    assert one.rule == "shape"


def test_a_call_may_be_any_callable_and_have_defaults() -> None:
    def call(table: float, layer: nn.Module, x: Tensor, more: int = 3) -> Tensor:
        out: Tensor = layer(x, table)
        return out

    assert check(Takes, 24, 3, call=functools.partial(call, 1.0)).passed


def test_tensors_that_the_call_makes_are_no_fault_of_the_layer() -> None:
    verdict = check(Takes, 24, 3, call=lambda layer, x: layer(x, torch.ones(1, 1, 24)))
    assert verdict.passed, str(verdict)
    assert "move" not in {one.rule for one in verdict.results}


def test_what_makes_a_layer_makes_it_for_the_call_that_is_shown() -> None:
    def made(dim: int, num_heads: int) -> nn.Module:
        return Takes(dim, num_heads)

    verdict = check(made, call=lambda layer, x: layer(x, 1.0))
    assert verdict.passed, str(verdict)
    assert verdict.subject == "made(dim=24, num_heads=3)"
