"""`attn_implementation="headwise"`: transformers' models beside their own sdpa or eager."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

import headwise as hw
from headwise.core.call import BoundedCache
from headwise.kernels import ctypes_api as cpu
from hugging_cases import CASES, SIZES, STATISTICS, apart, tokens, transformers, valid_queries

implementation = sys.modules[hw.register.__module__]
hw.register()
pytestmark = pytest.mark.skipif(bool(cpu.why_not()), reason="no native kernel")
OWN = {"bloom", "falcon", "gpt-j"}  # attention that asks no interface
OURS = {"attn_implementation": "headwise"}


@pytest.fixture(autouse=True)
def never_slower(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the native kernel also on CPUs without vector units."""
    monkeypatch.setattr("headwise.backends.slower", lambda call: False)
    monkeypatch.setattr("headwise.core.call.PREPARED", BoundedCache())  # what was chosen before


def close(one: Any, other: Any, inputs: dict[str, Any]) -> None:
    """That two outputs are, padded positions aside."""
    mask = inputs.get("decoder_attention_mask", inputs.get("attention_mask"))
    real = torch.ones_like(one[0][..., 0], dtype=torch.bool) if mask is None else mask.bool()
    torch.testing.assert_close(one[0][real], other[0][real], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("name", sorted(CASES.keys() - OWN))
@torch.no_grad()
def test_numbers_and_statistics_are_the_models_own(name: str, padded: bool) -> None:
    case = CASES[name]
    inputs = case.inputs(padded)
    model, own = case.model(**OURS), case.model()
    plain = model(**inputs)
    close(plain, own(**inputs), inputs)
    with hw.accelerate(model) as account, hw.watch(model, *STATISTICS) as seen:
        watched = model(**inputs)
    assert torch.equal(plain[0], watched[0])
    assert account.left == 0, str(account)
    assert account.served == 2 * len(case.where)
    assert {row["backend"] for row in account.table()} == {"native"}
    truth = case.model(attn_implementation="eager")(**inputs, output_attentions=True)
    for output, template in case.where.items():
        for n, p in enumerate(truth[output]):
            valid = valid_queries(output, inputs, p)
            assert apart(seen, template.format(n), p, valid) < 1e-5
    if case.default == "sdpa":
        with hw.watch(own, *STATISTICS) as seen, hw.accelerate(own) as account:
            close(own(**inputs), plain, inputs)
        assert (account.served, account.left) == (2 * len(case.where), 0), str(account)
        [function] = {row["function"] for row in account.table()}
        assert function == "sdpa_attention_forward"


@torch.no_grad()
def test_a_watched_call_takes_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[bool] = []
    forward = cpu.forward

    def counted(problem: Any, needs: int) -> Any:
        made.append(problem.v is not None)
        return forward(problem, needs)

    monkeypatch.setattr(cpu, "forward", counted)
    for name in ("llama", "mistral", "gemma2", "gpt-oss", "bert"):
        case = CASES[name]
        model, inputs = case.model(**OURS), case.inputs(padded=False)
        made.clear()
        with hw.watch(model, hw.Entropy(), hw.MaxLogit()):
            model(**inputs)
        assert made == [True, True], name


WRITERS = [
    ("gpt2", "LMHeadModel", "growing", True),
    ("llama", "ForCausalLM", "static", True),
    ("mistral", "ForCausalLM", "growing", True),
    ("gemma2", "ForCausalLM", "static", True),
    ("gpt-oss", "ForCausalLM", "growing", True),
    ("t5", "ForConditionalGeneration", "static", True),
    ("whisper", "ForConditionalGeneration", "growing", False),
]


@pytest.mark.parametrize(("name", "kind", "cache", "padded"), WRITERS)
@torch.no_grad()
def test_generation_token_for_token(name: str, kind: str, cache: str, padded: bool) -> None:
    case = CASES[name]
    inputs = case.inputs(padded)
    inputs = {key: x for key, x in inputs.items() if not key.startswith("decoder_")}
    options = {"cache_implementation": "static"} if cache == "static" else {}
    texts: list[Tensor] = []
    for model in (case.model(kind), case.model(kind, **OURS)):
        settings = {"max_new_tokens": 9, "do_sample": False, "disable_compile": True}
        model.generation_config.eos_token_id = None
        texts.append(model.generate(**inputs, **settings, **options))
    assert torch.equal(*texts)


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt-oss", "t5"])
def test_gradients(name: str) -> None:
    case = CASES[name]
    inputs = case.inputs(padded=False)
    found: list[dict[str, Tensor]] = []
    for model in (case.model(), case.model(**OURS)):
        model(**inputs)[0].square().sum().backward()
        found.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    assert found[0].keys() == found[1].keys()
    assert name != "gpt-oss" or any("sinks" in key for key in found[0])
    for key, grad in found[0].items():
        torch.testing.assert_close(found[1][key], grad, rtol=1e-3, atol=1e-3, msg=key)


def test_what_is_left_goes_to_sdpa_or_to_a_backend_that_can() -> None:
    for name, backend in (("llama", None), ("gemma2", "blocked")):
        case = CASES[name]
        model = case.model(**OURS).double()
        with hw.accelerate(model) as account:
            out = model(**case.inputs(padded=True))[0]
        assert out.isfinite().all()
        [used] = {row["backend"] for row in account.table()}
        assert used == backend
        assert backend is not None or "float64" in str(account)


@pytest.mark.parametrize("name", ["llama", "gpt-oss", "gemma2"])
def test_dropout_in_training_is_served(name: str) -> None:
    case = CASES[name]
    model, inputs = case.model(attention_dropout=0.5, **OURS).train(), case.inputs(padded=True)
    found = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        with hw.accelerate(model) as account:
            found.append(model(**inputs)[0])
        assert {row["backend"] for row in account.table()} == {"native"}
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])
    found[0].square().sum().backward()
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert any("q_proj" in name for name in gradients)
    assert all(gradient.isfinite().all() for gradient in gradients.values())


@torch.no_grad()
def test_sinks_and_softcap_are_never_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(implementation, "serve", lambda *_: "not today")
    for name in ("gemma2", "gpt-oss", "llama"):
        case = CASES[name]
        for padded in (False, True):
            inputs = case.inputs(padded)
            model = case.model(**OURS)
            with hw.accelerate(model) as account:
                close(model(**inputs), case.model()(**inputs), inputs)
            assert account.served == 0
            assert "not today" in str(account)


@torch.no_grad()
def test_a_model_that_no_kernel_may_serve_keeps_its_own_attention() -> None:
    config = transformers.SplinterConfig(**SIZES)
    kind = transformers.SplinterModel
    assert not any(getattr(kind, name) for name in implementation._SUPPORTS)
    outs: list[Any] = []
    inputs = tokens(side="right")
    for name in ("eager", "headwise"):
        torch.manual_seed(0)
        model = kind._from_config(config, attn_implementation=name).eval()
        with hw.accelerate(model) as account:
            outs.append(model(**inputs))
    assert torch.equal(outs[0][0], outs[1][0])
    assert "its own kind of attention" in str(account)


@torch.no_grad()
def test_a_mask_that_is_changed_in_place_is_another_mask() -> None:
    case = CASES["bert"]
    model, own = case.model(**OURS), case.model()
    inputs = case.inputs(padded=True)
    mask = inputs["attention_mask"][:, None, None].bool().expand(-1, 1, 11, -1).clone()
    for _ in range(2):
        given = inputs | {"attention_mask": mask}
        torch.testing.assert_close(model(**given)[0], own(**given)[0], rtol=1e-4, atol=1e-4)
        mask[0, ..., -4:] = False


@torch.no_grad()
def test_a_compiled_model_compiles_whole() -> None:
    case = CASES["llama"]
    model, inputs = case.model(**OURS), case.inputs(padded=True)
    torch._dynamo.reset()
    whole = torch.compile(model, backend="eager", fullgraph=True)
    close(whole(**inputs), model(**inputs), inputs)


@pytest.mark.slow
def test_only_register_registers() -> None:
    code = """
import sys
before = list(sys.meta_path)
import headwise as hw
assert sys.meta_path == before
assert not any(name.startswith("transformers") for name in sys.modules)
from transformers.modeling_utils import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface
assert "headwise" not in AttentionInterface()
for _ in range(2):
    hw.register()
    assert "headwise" in AttentionInterface() and "headwise" in AttentionMaskInterface()
print("fine")
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stdout.strip() == "fine", done.stderr
