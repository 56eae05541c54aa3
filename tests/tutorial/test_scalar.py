"""The scalar rung: its gradients, one training step beside PyTorch, its words and its command."""

import hashlib
import importlib.util
import json
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

FILE = Path(__file__).parents[2] / "src" / "headwise" / "systems" / "scalar.py"


def load() -> ModuleType:
    """The file on its own, without the shape checks of the test run, which would slow it down."""
    spec = importlib.util.spec_from_file_location("scalar_alone", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


scalar = load()
Value = scalar.Value


def total(values: list) -> Any:
    return sum(values, Value(0.0))


# --- Value ----------------------------------------------------------------------------------------

EXPRESSIONS: dict[str, Callable] = {
    "+": lambda x, y: x + y + 2.5 + x,
    "reflected": lambda x, y: 2.5 + x * y + 3.0 * y,
    "*": lambda x, y: x * y * x * -1.5,
    "-": lambda x, y: x - y * x - 1.0 + -y,
    "/": lambda x, y: x / (y * y + 1.0) + y / 3.0,
    "square": lambda x, y: (x + y) ** 2,
    "power 0": lambda x, y: x**0 + y,
    "power 1": lambda x, y: (x * y) ** 1,
    "power -1.5": lambda x, y: (x * x + 0.5) ** -1.5 * y,
    "exp": lambda x, y: (x * 0.5 + y * 0.5).exp(),
    "log": lambda x, y: (x * x + y.exp()).log(),
    "relu": lambda x, y: (x * y).relu() + x.relu(),
    "shared": lambda x, y: (lambda z: z * z + z.exp() * x + z)(x * 0.3 + y * 0.3),
}
NUMBERS = st.floats(-4, 4).filter(lambda x: x == 0 or abs(x) > 1e-3)


@pytest.mark.parametrize("name", EXPRESSIONS)
@given(x=NUMBERS, y=NUMBERS)
def test_gradients_are_torchs(name: str, x: float, y: float) -> None:
    ours = Value(x), Value(y)
    result = EXPRESSIONS[name](*ours)
    result.backward()
    theirs = [torch.tensor(v, dtype=torch.float64, requires_grad=True) for v in (x, y)]
    expected = EXPRESSIONS[name](*theirs)
    expected.backward()
    assert result.data == pytest.approx(expected.item(), rel=1e-12, abs=1e-12)
    for value, tensor in zip(ours, theirs, strict=True):
        wanted = 0.0 if tensor.grad is None else tensor.grad.item()
        assert value.grad == pytest.approx(wanted, rel=1e-12, abs=1e-12)


def test_dot_is_a_sum_of_products() -> None:
    draw = random.Random(0)
    numbers = [[draw.gauss(0, 1) for _ in range(7)] for _ in range(2)]
    a, b = scalar.as_values(numbers)
    c, d = scalar.as_values(numbers)
    fused, plain = scalar.dot(a, b), total([x * y for x, y in zip(c, d, strict=True)])
    fused.backward()
    plain.backward()
    assert fused.data == pytest.approx(plain.data, rel=1e-14)
    assert [v.grad for v in a + b] == pytest.approx([v.grad for v in c + d], rel=1e-14)
    assert len(scalar.graph(fused)) == 14 + 1
    with pytest.raises(ValueError, match="shorter"):
        scalar.dot(a, b[:-1])


def test_a_value_used_twice_in_a_dot_gets_both_gradients() -> None:
    x, y = Value(3.0), Value(5.0)
    scalar.dot([x, y], [x, y]).backward()
    assert (x.grad, y.grad) == (6.0, 10.0)


def test_depth_is_no_limit() -> None:
    x = Value(1.0)
    chain = x
    for _ in range(100_000):
        chain = chain + x
    chain.backward()
    assert (chain.data, x.grad) == (100_001.0, 100_001.0)
    assert len(scalar.graph(chain)) == 100_001
    del chain  # nor is it one for letting the graph go


def test_a_graph_lists_each_value_once_after_its_inputs() -> None:
    x = Value(2.0)
    y = x * x
    root = (y + x) * y.exp()
    order = scalar.graph(root)
    assert len(order) == len(set(order)) == 5
    for position, node in enumerate(order):
        assert all(order.index(source) < position for source in node.inputs)


def test_gradients_of_leaves_add_up_and_those_between_do_not() -> None:
    x = Value(3.0)
    root = x * x + x
    root.backward()
    root.backward()
    assert x.grad == 2 * 7.0


@pytest.mark.parametrize("fault", [lambda: Value(-1.0) ** 0.5, lambda: Value(0.0).log()])
def test_what_has_no_real_value_is_refused(fault: Callable) -> None:
    with pytest.raises(ValueError, match="math domain error"):
        fault()


def test_relu_lets_nan_through() -> None:
    assert str(Value(float("nan")).relu().data) == "nan"


# --- the layers -----------------------------------------------------------------------------------


def test_softmax_of_huge_scores_is_finite() -> None:
    weights = [w.data for w in scalar.softmax([Value(s) for s in (1e4, 1e4, -1e4)])]
    assert weights == [0.5, 0.5, 0.0]


def test_cross_entropy_of_hopeless_targets_is_finite() -> None:
    logits = [Value(2000.0), Value(0.0)]
    loss = scalar.cross_entropy(logits, 1)
    loss.backward()
    assert (loss.data, logits[0].grad, logits[1].grad) == (2000.0, 1.0, -1.0)


def test_rmsnorm_makes_the_mean_square_one() -> None:
    x = scalar.rmsnorm([Value(v) for v in (3.0, -4.0, 12.0, 0.5)])
    assert sum(v.data**2 for v in x) / 4 == pytest.approx(1, abs=1e-5)


def numbers(matrix: list) -> Tensor:
    return torch.tensor([[v.data for v in row] for row in matrix], dtype=torch.float64)


def slopes(matrix: list) -> Tensor:
    return torch.tensor([[v.grad for v in row] for row in matrix], dtype=torch.float64)


def test_attention_with_given_weights_is_torchs() -> None:
    length, width, heads = 5, 6, 3
    x = torch.randn(length, width, dtype=torch.float64, requires_grad=True)
    weights = torch.randn(4, width, width, dtype=torch.float64).unbind()
    for weight in weights:
        weight.requires_grad_()
    theirs = torch_attention(x, weights, heads)
    pull = torch.randn(length, width, dtype=torch.float64)
    theirs.backward(pull)

    leaves = [scalar.as_values(t.tolist()) for t in (x, *weights)]
    keys, values = [], []
    ours = [scalar.attention(row, *leaves[1:], keys, values, heads) for row in leaves[0]]
    assert len(keys) == len(values) == length
    pulls = [Value(number) for number in pull.flatten().tolist()]
    scalar.dot([v for row in ours for v in row], pulls).backward()
    torch.testing.assert_close(numbers(ours), theirs.detach(), rtol=1e-12, atol=1e-12)
    for leaf, tensor in zip(leaves, (x, *weights), strict=True):
        torch.testing.assert_close(slopes(leaf), tensor.grad, rtol=1e-12, atol=1e-12)


def test_attention_refuses_heads_that_do_not_divide() -> None:
    row, square = [Value(1.0)] * 6, scalar.as_values([[1.0] * 6] * 6)
    with pytest.raises(ValueError, match="n_head must divide the width 6, got 4"):
        scalar.attention(row, square, square, square, square, [], [], 4)


# --- the model beside PyTorch ---------------------------------------------------------------------


def torch_attention(x: Tensor, weights: Sequence[Tensor], heads: int) -> Tensor:
    wq, wk, wv, wo = weights
    q, k, v = ((x @ w.T).unflatten(1, (heads, -1)).transpose(0, 1) for w in (wq, wk, wv))
    scores = q @ k.mT / q.shape[-1] ** 0.5
    future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    out = scores.masked_fill(future, -torch.inf).softmax(-1) @ v
    return out.transpose(0, 1).flatten(1) @ wo.T


def torch_losses(w: dict[str, Tensor], tokens: list[int], layers: int, heads: int) -> Tensor:
    def norm(x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], eps=1e-5)

    ids = torch.tensor(tokens)
    x = norm(w["wte"][ids[:-1]] + w["wpe"][: len(ids) - 1])
    for i in range(layers):
        attn = [w[f"layer{i}.attn_w{name}"] for name in "qkvo"]
        x = x + torch_attention(norm(x), attn, heads)
        x = x + F.relu(norm(x) @ w[f"layer{i}.mlp_fc1"].T) @ w[f"layer{i}.mlp_fc2"].T
    return F.cross_entropy(x @ w["lm_head"].T, ids[1:], reduction="none")


@pytest.mark.parametrize("layers", [1, 2])
def test_whole_training_steps_are_torchs(layers: int) -> None:
    model = scalar.ScalarGPT(27, n_layer=layers)
    twin = {name: numbers(matrix).requires_grad_() for name, matrix in model.state_dict.items()}
    documents = [[26, 0, 11, 4, 5, 26], [26, *range(15), 26]]
    theirs = torch.optim.Adam(twin.values(), lr=0.01, betas=(0.85, 0.99), eps=1e-8)
    ours = scalar.Adam(model.parameters())
    exact = {"rtol": 0, "atol": 1e-10}
    for document in documents:  # the second step has moments of the first
        losses = model.losses(document)
        loss = total(losses) * (1 / len(losses))
        loss.backward()
        expected = torch_losses(twin, document, layers, heads=4)
        theirs.zero_grad()
        expected.mean().backward()
        assert loss.data == pytest.approx(expected.mean().item(), abs=1e-10)
        assert [v.data for v in losses] == pytest.approx(expected.tolist(), abs=1e-10)
        for name, matrix in model.state_dict.items():
            assert twin[name].grad is not None
            torch.testing.assert_close(slopes(matrix), twin[name].grad, **exact, msg=name)
        ours.step(0.01)
        theirs.step()
        for name, matrix in model.state_dict.items():
            torch.testing.assert_close(numbers(matrix), twin[name].detach(), **exact, msg=name)
            assert not slopes(matrix).any()


def test_sizes() -> None:
    model = scalar.ScalarGPT(27)
    assert len(model.parameters()) == 4192
    shapes = {name: (len(m), len(m[0])) for name, m in model.state_dict.items()}
    assert shapes == {
        "wte": (27, 16),
        "wpe": (16, 16),
        "lm_head": (27, 16),
        **{f"layer0.attn_w{name}": (16, 16) for name in "qkvo"},
        "layer0.mlp_fc1": (64, 16),
        "layer0.mlp_fc2": (16, 64),
    }


def test_seeds_draw_the_weights() -> None:
    first, same, other = (scalar.ScalarGPT(5, seed=seed).state_dict["wte"] for seed in (1, 1, 2))
    assert torch.equal(numbers(first), numbers(same))
    assert not torch.equal(numbers(first), numbers(other))


def test_no_loss_depends_on_later_tokens() -> None:
    model = scalar.ScalarGPT(27)
    begin = [26, 3, 1, 4]
    first, second = (model.losses(begin + end) for end in ([1, 5, 26], [9, 2, 6]))
    data = [[loss.data for loss in losses] for losses in (first, second)]
    assert data[0][:3] == data[1][:3]
    assert data[0][3] != data[1][3]
    first[2].backward()  # the loss on token 4 reaches positions 0, 1 and 2 only
    reached = slopes(model.state_dict["wpe"]).abs().sum(dim=1) > 0
    assert reached.tolist() == [True] * 3 + [False] * 13


def test_long_documents_are_cut_at_the_block() -> None:
    model = scalar.ScalarGPT(5, block_size=3)
    assert len(model.losses([4, 0, 1, 2, 3, 4])) == 3
    keys, values = model.empty(), model.empty()
    with pytest.raises(ValueError, match=r"gpt\(token=0, position=3\).*3 positions"):
        model.gpt(0, 3, keys, values)
    with pytest.raises(ValueError, match=r"gpt\(token=-1, position=0\).*5 tokens"):
        model.gpt(-1, 0, keys, values)
    assert keys == values == [[]]


@pytest.mark.parametrize("sizes", [{"n_head": 3}, {"n_layer": 0}, {"block_size": 0}])
def test_sizes_that_no_model_has_are_refused(sizes: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="ScalarGPT"):
        scalar.ScalarGPT(27, **sizes)


def test_a_document_without_a_target_is_refused() -> None:
    with pytest.raises(ValueError, match=r"losses\(\[26\]\)"):
        scalar.ScalarGPT(27).losses([26])


# --- training and sampling ------------------------------------------------------------------------


def test_training_lowers_the_loss_and_its_rate_reaches_zero() -> None:
    model = scalar.ScalarGPT(27)
    documents = [[26, 0, 11, 4, 5, 26], [26, 6, 0, 12, 12, 0, 26]]
    losses = [sum(x) / len(x) for x in scalar.train(model, documents, 20)]
    assert len(losses) == 20
    assert sum(losses[-4:]) < 0.5 * sum(losses[:4])
    still = numbers(scalar.ScalarGPT(27).state_dict["wte"])
    frozen = scalar.ScalarGPT(27)
    list(scalar.train(frozen, documents, 1, rate=0.0))
    assert torch.equal(numbers(frozen.state_dict["wte"]), still)


def test_the_learning_rate_falls_linearly(monkeypatch: pytest.MonkeyPatch) -> None:
    rates: list[float] = []
    monkeypatch.setattr(scalar.Adam, "step", lambda self, rate: rates.append(rate))
    list(scalar.train(scalar.ScalarGPT(3), [[2, 0, 2]], 4))
    assert rates == pytest.approx([0.01, 0.0075, 0.005, 0.0025])


def favouring(logits: list[float]) -> object:
    """A model whose every next token has these logits."""
    model = scalar.ScalarGPT(len(logits), block_size=6)
    model.gpt = lambda *_: [Value(x) for x in logits]
    return model


def test_the_temperature_divides_the_logits() -> None:
    model, draw = favouring([0.0, 1.0, -50.0]), random.Random(0)  # token 2 never ends it
    assert scalar.sample(model, 2, 0.0, draw) == [1] * 6  # and the block does
    counts = {}
    for temperature in (0.1, 1.0, 100.0):
        drawn = [token for _ in range(300) for token in scalar.sample(model, 2, temperature, draw)]
        counts[temperature] = drawn.count(1) / len(drawn)
    assert counts[0.1] > 0.999
    assert counts[1.0] == pytest.approx(torch.tensor(1.0).sigmoid().item(), abs=0.05)
    assert counts[100.0] == pytest.approx(0.5, abs=0.05)


def test_samples_end_at_the_start_token_and_are_their_seeds() -> None:
    model = scalar.ScalarGPT(4, block_size=8)
    drawn = [scalar.sample(model, 3, 1.0, random.Random(seed)) for seed in range(40)]
    assert all(len(tokens) <= 8 and 3 not in tokens for tokens in drawn)
    assert {len(tokens) for tokens in drawn} >= {0, 1, 2}
    assert drawn[7] == scalar.sample(model, 3, 1.0, random.Random(7))


# --- words and baselines --------------------------------------------------------------------------


def test_the_words_are_frozen() -> None:
    words = scalar.unicode_words()
    assert len(words) == 12_867
    assert words == sorted(set(words))
    assert set("".join(words)) == set("abcdefghijklmnopqrstuvwxyz")
    assert (min(map(len, words)), max(map(len, words))) == (3, 15)
    digest = hashlib.sha256("\n".join(words).encode()).hexdigest()
    assert digest == "2ab9cc337c05eae25fcb703c36031d9d6946ae47d3410c1580326b37590c8b65"


def test_baselines_worked_out_by_hand() -> None:
    documents = [[2, 0, 0, 2], [2, 1, 2]]  # targets 0 0 2 1 2; pairs 20 00 02 21 12
    unigram, bigram = (scalar.Baseline(documents, 4, history) for history in (False, True))
    # 5 tokens, 3 different ones: 3 parts of 8 are left, a quarter of them for each of 4 symbols.
    p = [(n + 3 / 4) / 8 for n in (2, 1, 2, 0)]
    assert [unigram.probability(2, token) for token in range(4)] == pytest.approx(p)
    # After 2 came 0 and 1, once each: 2 parts of 4 are left.
    q = [(n + 2 * p[token]) / 4 for token, n in enumerate((1, 1, 0, 0))]
    assert [bigram.probability(2, token) for token in range(4)] == pytest.approx(q)
    assert [bigram.probability(3, token) for token in range(4)] == pytest.approx(p)
    assert sum(p) == pytest.approx(1)
    assert sum(q) == pytest.approx(1)
    assert len(bigram.losses([2, 3, 1, 2])) == 3


# --- the file and its command ---------------------------------------------------------------------

BLOCKED = """
import runpy, sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] not in sys.stdlib_module_names | {"sitecustomize"}:
            raise ModuleNotFoundError(f"{name} is blocked", name=name)
sys.meta_path.insert(0, Blocked())
"""


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_it_needs_only_the_standard_library_and_runs_whole() -> None:
    options = ["scalar", "--steps", "20", "--samples", "3"]
    done = python(
        "-c", f"{BLOCKED}sys.argv = {options}\nrunpy.run_path({str(FILE)!r}, None, '__main__')"
    )
    assert done.returncode == 0, done.stderr
    first, step, held, *samples = done.stdout.splitlines()
    assert first == "12,867 documents, 200 held out, 27 symbols, 4,192 parameters"
    losses = dict(zip(step.split()[4::2], map(float, step.split()[5::2]), strict=True))
    assert list(losses) == ["loss", "unigram", "bigram"]
    assert 0 < losses["bigram"] < losses["unigram"] < losses["loss"] < 3.3  # ln 27 = 3.296
    assert held.split()[3:6] == ["held", "out", "200"]
    assert len(samples) == 3
    assert done.stderr == ""


@pytest.mark.parametrize("name", ["torch", "numpy"])
def test_the_block_can_fail(name: str) -> None:
    assert f"{name} is blocked" in python("-c", f"{BLOCKED}import {name}").stderr


def test_it_runs_as_a_module(tmp_path: Path) -> None:
    data = tmp_path / "names.txt"
    data.write_text("anna\n\n  bob \nczesława and a long line that is cut\n", "utf-8")
    record = tmp_path / "run.json"
    done = python(
        "-m",
        "headwise.systems.scalar",
        "--data",
        str(data),
        "--steps",
        "5",
        "--seed",
        "3",
        "--samples",
        "4",
        "--temperature",
        "0",
        "--record",
        str(record),
    )
    assert done.returncode == 0, done.stderr
    assert "3 documents, 1 held out, 19 symbols" in done.stdout
    kept = json.loads(record.read_text("utf-8"))
    assert kept["settings"] == {
        **{"data": "names.txt", "steps": 5, "seed": 3, "samples": 4, "temperature": 0.0}
    }
    assert kept["sizes"]["symbols"] == 19
    assert kept["window"].keys() == kept["held_out"].keys() == {"loss", "unigram", "bigram"}
    assert len(kept["samples"]) == 4
    assert len(set(kept["samples"])) == 1  # at temperature 0 nothing is drawn
    assert kept["seconds"] > 0


@pytest.fixture
def bad(tmp_path: Path) -> Path:
    (tmp_path / "empty").write_text("\n \n")
    (tmp_path / "one").write_text("alone\n")
    (tmp_path / "binary").write_bytes(b"ab\n\xff\n")
    return tmp_path


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--steps 0", "--steps must be at least 1, got 0"),
        ("--steps -3", "--steps must be at least 1, got -3"),
        ("--steps many", "--steps: invalid int value: 'many'"),
        ("--samples -1", "--samples must be at least 0, got -1"),
        ("--temperature -1", "--temperature must be at least 0, got -1.0"),
        ("--temperature nan", "--temperature must be at least 0, got nan"),
        ("--temperature inf", "--temperature must be at least 0, got inf"),
        ("--data DIR/nothing", "No such file or directory: 'DIR/nothing'"),
        ("--data DIR", "Is a directory: 'DIR'"),
        ("--data DIR/empty", "DIR/empty must have at least two lines"),
        ("--data DIR/one", "DIR/one must have at least two lines"),
        ("--data DIR/binary", "DIR/binary: not UTF-8 text (byte 3 is invalid)"),
        ("--record DIR/no/run.json", "the file cannot be written"),
        ("--record DIR", "the file cannot be written"),
    ],
)
def test_bad_input_is_one_line_and_code_2(
    bad: Path, capsys: pytest.CaptureFixture[str], options: str, message: str
) -> None:
    try:
        code = scalar.main(options.replace("DIR", str(bad)).split())
    except SystemExit as left:
        code = left.code
    told = capsys.readouterr()
    assert code == 2
    assert message.replace("DIR", str(bad)) in told.err
    assert told.err.startswith("headwise.systems.scalar: ")
    assert told.err.count("\n") == 1
    assert told.out == ""


def test_ctrl_c_ends_it_tidily() -> None:
    command = [sys.executable, str(FILE), "--steps", "1000000"]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A shell starts background jobs with Ctrl-C ignored, and children inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as running:
        assert running.stdout is not None
        running.stdout.readline()  # it says what it has before it begins
        running.send_signal(signal.SIGINT)
        _, errors = running.communicate(timeout=60)
    assert (running.returncode, errors) == (130, "headwise.systems.scalar: stopped\n")


def test_a_reader_that_has_had_enough_is_no_fault() -> None:
    with subprocess.Popen(
        [sys.executable, str(FILE), "--steps", "150", "--samples", "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as running:
        assert running.stdout is not None
        running.stdout.close()
        assert running.stderr is not None
        assert running.stderr.read() == ""
    assert running.returncode == 0
