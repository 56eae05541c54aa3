"""`watch()` on what is registered with transformers' attention interface, and on its kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fresh
import headwise as hw
from headwise.capture.call import AttentionCall
from headwise.capture.catch import catch
from hugging_cases import CASES, STATISTICS, B, T, apart, by_hand, tokens, valid_queries

# Functions that are registered.

MADE: list[str] = []


def attention_of_mine(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """A kernel as FlashAttention is: by position and padding, and nothing of PyTorch's inside."""
    MADE.append("called")
    share = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(share, 1) for x in (key, value))
    scores = (query[:, :, :, None] * key[:, :, None]).sum(-1) * scaling
    if softcap is not None:
        scores = softcap * (scores / softcap).tanh()
    queries, keys = scores.shape[2:]
    behind = torch.arange(queries)[:, None] + keys - queries - torch.arange(keys)
    allowed = behind >= 0
    if sliding_window is not None:
        allowed = allowed & (behind < sliding_window)
    allowed = allowed.expand(len(query), 1, -1, -1)
    if attention_mask is not None:
        allowed = allowed & attention_mask.bool()[:, None, None, -keys:]
    e = torch.where(allowed, (scores - scores.amax(-1, keepdim=True)).exp(), 0.0)
    total = e.sum(-1, keepdim=True)
    if s_aux is not None:
        total = total + (s_aux.view(1, -1, 1, 1) - scores.amax(-1, keepdim=True)).exp()
    out = ((e / total.clamp(min=1e-30))[..., None] * value[:, :, None]).sum(3)
    return out.transpose(1, 2), None


def rectified(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> Any:
    """No softmax at all."""
    share = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(share, 1) for x in (k, v))
    return (torch.relu(q @ k.mT) @ v).transpose(1, 2), None


def sharpened(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, **options: Any) -> Any:
    """Other scores than its arguments say, by PyTorch's own function."""
    share = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(share, 1) for x in (k, v))
    out = torch.nn.functional.scaled_dot_product_attention(3 * q, k, v, is_causal=True)
    return out.transpose(1, 2), None


@pytest.fixture
def register() -> Iterator[Callable[..., str]]:
    """Register a function with transformers, and take it back."""
    from transformers import AttentionInterface, AttentionMaskInterface

    names: list[str] = []

    def registered(function: Callable[..., Any], masks: str | None) -> str:
        names.append(f"mine_{len(names)}")
        AttentionInterface.register(names[-1], function)
        if masks is not None:
            known = AttentionMaskInterface._global_mapping[masks]
            AttentionMaskInterface.register(names[-1], known)
        return names[-1]

    yield registered
    for name in names:
        AttentionInterface._global_mapping.pop(name)
        AttentionMaskInterface._global_mapping.pop(name, None)


@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gpt-oss"])
@torch.no_grad()
def test_a_registered_kernel_is_watched(
    name: str, padded: bool, register: Callable[..., str]
) -> None:
    case = CASES[name]
    model, inputs = case.model(), case.inputs(padded)
    model.set_attn_implementation("eager")
    truth = model(**inputs, output_attentions=True)["attentions"]
    model.set_attn_implementation(register(attention_of_mine, "flash_attention_2"))
    plain = model(**inputs)
    MADE.clear()
    with hw.watch(model, *STATISTICS) as seen:
        watched = model(**inputs)
    assert len(MADE) == 3  # one of them to find out what its arguments mean
    assert torch.equal(plain[0], watched[0])
    for n, p in enumerate(truth):
        valid = valid_queries("attentions", inputs, p)
        assert apart(seen, case.where["attentions"].format(n), p, valid) < 1e-5


@torch.no_grad()
def test_masks_are_those_of_the_implementation(register: Callable[..., str]) -> None:
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    def passed_on(*args: Any, **kwargs: Any) -> Any:
        return sdpa_attention_forward(*args, **kwargs)

    case = CASES["llama"]
    model, inputs = case.model(), case.inputs(True)
    real = inputs["attention_mask"].bool()
    for masks, valid in (("sdpa", real), (None, torch.ones_like(real))):
        model.set_attn_implementation(register(passed_on, masks))
        with hw.watch(model, hw.Entropy()) as seen:
            model(**inputs)
        counted = seen["layers.0.self_attn"].calls[0]["entropy"].rows
        assert torch.equal(counted.expand(B, 4, T)[:, 0], valid)
        # Without masks of its own the model has none for it, and watching changes nothing of that.
        model.set_attn_implementation("eager")
        given = inputs if masks else {"input_ids": inputs["input_ids"]}
        p = model(**given, output_attentions=True)["attentions"][1]
        wanted = by_hand(p, valid)["entropy"]
        got = [row["entropy"] for row in seen.table() if row["module"] == "layers.1.self_attn"]
        torch.testing.assert_close(torch.tensor(got).double(), wanted, rtol=0, atol=1e-5)


@torch.no_grad()
def test_a_function_with_other_scores_is_heard_inside(register: Callable[..., str]) -> None:
    model, inputs = CASES["llama"].model(), CASES["llama"].inputs(False)
    with hw.watch(model, hw.LSE()) as seen:
        model(**inputs)
    model.set_attn_implementation(register(sharpened, "sdpa"))
    plain = model(**inputs)
    with hw.watch(model, hw.LSE(), hw.Entropy()) as sharp:
        assert torch.equal(model(**inputs)[0], plain[0])
    assert sharp.modules == seen.modules
    first = sharp["layers.0.self_attn"]
    assert len(first.calls) == 1
    assert first["lse"].amax() > 1.5 * seen["layers.0.self_attn"]["lse"].amax()


@torch.no_grad()
def test_what_is_no_softmax_is_left_out_with_the_reason(register: Callable[..., str]) -> None:
    from transformers import AttentionInterface

    model, inputs = CASES["llama"].model(), CASES["llama"].inputs(False)
    model.set_attn_implementation(register(rectified, "sdpa"))
    handed = vars(AttentionInterface).copy()
    plain = model(**inputs)[0]
    with hw.watch(model, hw.Entropy()) as seen:
        assert torch.equal(model(**inputs)[0], plain)
    assert vars(AttentionInterface) == handed
    assert list(seen.left_out) == ["layers.0.self_attn", "layers.1.self_attn"]
    with pytest.raises(ValueError, match=r"rectified does not return softmax"):
        seen.table()
    said = r"rectified does not return softmax"
    with pytest.raises(ValueError, match=said), hw.ablate(model, "L0H0"):
        model(**inputs)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@torch.no_grad()
def test_another_output_goes_on_in_its_place(implementation: str) -> None:
    model, inputs = CASES["llama"].model(), CASES["llama"].inputs(True)
    model.set_attn_implementation(implementation)
    told: list[AttentionCall] = []

    def zero(call: AttentionCall) -> Tensor | None:
        told.append(call)
        if call.name != "layers.0.self_attn":
            return None
        out = call.out.clone()
        out[:, 2] = 0.0
        return out

    def zero_by_hand(_: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
        heads = args[0].unflatten(-1, (4, 8)).clone()
        heads[:, :, 2] = 0.0
        return (heads.flatten(-2),)

    with catch(model, zero), hw.watch(model, hw.OutputNorm()) as seen:
        ablated = model(**inputs)[0]
    assert [call.route for call in told] == [f"{implementation}_attention_forward"] * 2
    for call in told:
        weight = model.get_submodule(call.name).o_proj.weight
        assert isinstance(call, AttentionCall)
        assert call.projection is weight
        assert call.k.shape[1] == 2  # keys as they are, one for a group of heads
    assert (seen["layers.0.self_attn"]["output_norm"][:, 2] == 0).all()
    assert (seen["layers.1.self_attn"]["output_norm"][0, 2] > 0).all()
    assert "contribution" in seen.table()[0]
    model.layers[0].self_attn.o_proj.register_forward_pre_hook(zero_by_hand)
    assert torch.equal(model(**inputs)[0], ablated)
    assert not torch.equal(ablated, CASES["llama"].model()(**inputs)[0])


def stand_in(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attention_mask: Tensor | None,
    query_length: int,
    is_causal: bool,
    position_ids: Tensor | None = None,
    softmax_scale: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> Tensor:
    """What transformers says of its flash kernels, on `[B, T, H, D]`."""
    mask = hw.Causal() if is_causal else hw.Dense(torch.ones(1, 1, dtype=torch.bool))
    if sliding_window is not None and is_causal:
        mask = hw.Window(sliding_window)
    if attention_mask is not None:
        mask = mask & hw.Dense(attention_mask.bool()[:, None, None])
    if position_ids is not None and len(q) == 1 and (position_ids == 0).sum() > 1:
        mask = mask & hw.Documents((position_ids == 0).cumsum(1))
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out = hw.attend(q, k, v, mask=mask, scale=softmax_scale, softcap=softcap, sinks=s_aux)
    return out.transpose(1, 2)


@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("name", ["mistral", "gemma2", "gpt-oss", "bert", "bart"])
@torch.no_grad()
def test_flash_is_read_from_its_arguments(
    name: str, padded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a stand-in for the kernel, which needs a graphics card and a package of its own."""
    case = CASES[name]
    model, inputs = case.model(), case.inputs(padded)
    model.set_attn_implementation("eager")
    truth = model(**inputs, output_attentions=True)
    flash = "transformers.integrations.flash_attention._flash_attention_forward"
    monkeypatch.setattr(flash, stand_in)
    for part in model.modules():
        if hasattr(part, "config"):
            part.config._attn_implementation_internal = "flash_attention_2"
    plain = model(**inputs)
    with hw.watch(model, *STATISTICS) as seen:
        watched = model(**inputs)
    assert torch.equal(plain[0], watched[0])
    for output, template in case.where.items():
        for n, p in enumerate(truth[output]):
            module = template.format(n)
            assert apart(seen, module, p, valid_queries(output, inputs, p)) < 1e-5, module


@torch.no_grad()
def test_texts_side_by_side_in_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Told by a mask to most functions, and by places alone to flash kernels."""
    model = CASES["mistral"].model()
    ids = tokens()["input_ids"][:1]
    places = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 6]])
    with hw.watch(model, hw.Entropy(), hw.Distance()) as seen:
        model(ids, position_ids=places, use_cache=False)
    with hw.watch(model, hw.Entropy(), hw.Distance()) as alone:
        for part in (slice(4), slice(4, None)):
            model(ids[:, part], position_ids=places[:, part], use_cache=False)
    monkeypatch.setattr(
        "transformers.integrations.flash_attention._flash_attention_forward", stand_in
    )
    model.config._attn_implementation_internal = "flash_attention_2"
    with hw.watch(model, hw.Entropy(), hw.Distance()) as flash:
        model(ids, position_ids=places, use_cache=False)
    for found in (seen, flash):
        for one, other in zip(found.table(), alone.table(), strict=True):
            for name in ("entropy", "distance"):
                assert one[name] == pytest.approx(other[name], abs=1e-5)


FLEX = """
import functools
import torch, transformers, headwise as hw
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from transformers import masking_utils
from transformers.integrations import flex_attention as flexible

def without_compiler(*tensors, training, **options):
    return flex_attention(*tensors, **options)

flexible.compile_friendly_flex_attention = without_compiler
masking_utils.create_block_mask = lambda **all: create_block_mask(**all | {"_compile": False})
torch.manual_seed(0)
config = transformers.Gemma2Config(
    hidden_size=32, num_attention_heads=2, num_key_value_heads=1, head_dim=16, intermediate_size=32,
    sliding_window=40, attn_logit_softcapping=3.0, num_hidden_layers=2, vocab_size=37,
)
model = transformers.Gemma2Model(config).eval()
ids, real = torch.randint(3, 37, (2, 130)), torch.ones(2, 130, dtype=torch.long)
real[1, :30] = 0
with torch.no_grad():
    with hw.watch(model, hw.Entropy(), hw.Distance()) as usual:
        model(ids, attention_mask=real)
    model.set_attn_implementation("flex_attention")
    plain = model(ids, attention_mask=real)[0]
    with hw.watch(model, hw.Entropy(), hw.Distance()) as seen:
        watched = model(ids, attention_mask=real)[0]
assert torch.equal(plain, watched)
assert seen.modules == usual.modules and len(seen.modules) == 2
for one, other in zip(seen.table(), usual.table(), strict=True):
    assert one["calls"] == 1
    for name in ("entropy", "distance"):
        assert abs(one[name] - other[name]) < 1e-4, (name, one, other)
print("seen")
"""


def test_flex_is_watched() -> None:
    run = fresh.run(FLEX)
    assert run.stdout.strip() == "seen", run.stderr[-2000:]


# What arguments mean, of calls that could tell.


class Asks(nn.Module):
    """Attention of the interface on `[B, H, T, D]`, with the mask that is given."""

    def __init__(self, implementation: str, is_causal: bool) -> None:
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
        from transformers.models.bert.modeling_bert import eager_attention_forward

        super().__init__()
        self.implementation, self.is_causal = implementation, is_causal
        self.known: Any = ALL_ATTENTION_FUNCTIONS
        self.eager = eager_attention_forward
        self.weights = torch.empty(0)

    def forward(self, q: Tensor, k: Tensor, mask: Tensor | None = None) -> Tensor:
        attend = self.known.get_interface(self.implementation, self.eager)
        out, self.weights = attend(self, q, k, k, mask, scaling=0.5, dropout=0.0)
        return out


class Both(nn.Module):
    """Two of them, of which one may look ahead."""

    def __init__(self, implementation: str, first_is_causal: bool) -> None:
        super().__init__()
        self.a = Asks(implementation, first_is_causal)
        self.b = Asks(implementation, not first_is_causal)

    def forward(self, q: Tensor, k: Tensor) -> Tensor:
        return self.a(q, k) + self.b(q, k)


@pytest.mark.parametrize("first_is_causal", [False, True])
@pytest.mark.parametrize("alike", [False, True], ids=["other tokens", "equal tokens"])
@torch.no_grad()
def test_a_module_that_is_not_causal_teaches_nothing_of_one_that_is(
    first_is_causal: bool, alike: bool
) -> None:
    """`eager` without a mask is bidirectional, whatever the module says of itself."""
    model, x = Both("eager", first_is_causal), torch.randn(2, 3, 6, 4)
    before = x[:, :, :1].expand_as(x).contiguous() if alike else x
    with hw.watch(model, hw.Entropy()) as seen:
        model(before, before)
        model(x, x)
    model(x, x)
    for name in ("a", "b"):
        wanted = torch.special.entr(getattr(model, name).weights).sum(-1)
        torch.testing.assert_close(
            seen[name].calls[1]["entropy"].values, wanted, atol=1e-5, rtol=1e-5
        )


@torch.no_grad()
def test_a_kernel_that_goes_by_position_is_one_in_each_form(register: Callable[..., str]) -> None:
    """The same function, first where its meanings are one, then where they differ."""

    def by_position(module: Any, *args: Any, **options: Any) -> Any:
        if not module.is_causal:
            full = torch.nn.functional.softmax(args[0] @ args[1].mT * 0.5, -1) @ args[2]
            return full.transpose(1, 2), None
        return attention_of_mine(module, *args, **options)

    name = register(by_position, None)
    model, x = Both(name, False), torch.randn(2, 3, 6, 4)
    with hw.watch(model, hw.Entropy()) as seen:
        model(x, x)
    full = (x @ x.mT * 0.5).softmax(-1)
    later = torch.ones(6, 6).triu(1).bool()
    causal = (x @ x.mT * 0.5).masked_fill(later, -torch.inf).softmax(-1)
    for module, p in (("a", full), ("b", causal)):
        wanted = torch.special.entr(p).sum(-1)
        torch.testing.assert_close(seen[module]["entropy"], wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("memory", [1, 2])
@torch.no_grad()
def test_padding_stands_before_a_memory_key(implementation: str, memory: int) -> None:
    real = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0]]).bool()
    allowed = nn.functional.pad(real, (0, memory), value=True)[:, None, None]
    mask = torch.zeros(allowed.shape).masked_fill(~allowed, torch.finfo(torch.float32).min)
    model, q, k = Asks(implementation, True), torch.randn(2, 3, 6, 4), torch.randn(2, 3, 8, 4)
    with hw.watch(model, hw.LSE(), hw.Mass(hw.Self())) as seen:
        model(q, k[:, :, : 6 + memory], mask.expand(-1, 1, 6, -1))
    call = seen[""].calls[0]
    assert torch.equal(call["lse"].rows.expand(2, 3, 6), real[:, None].expand(2, 3, 6))
    p = (q @ k[:, :, : 6 + memory].mT * 0.5 + mask).softmax(-1)
    rows = real[:, None].expand(2, 3, 6)
    own = p.diagonal(0, -2, -1)
    torch.testing.assert_close(call["self"].values[rows], own[rows], atol=1e-6, rtol=1e-5)
