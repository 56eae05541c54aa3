"""A GPT that trains in plain Python: every number is a `Value` that records its inputs.

The first rung of the ladder, after Karpathy's microgpt (2026). It needs only the standard library:
a sum of products is a loop, a head is the slice `hs : hs + head_dim` of a list, and attention is
causal because the lists of keys and values hold only past tokens.

    python -m headwise.systems.scalar --steps 1000

The model resembles GPT-2, with RMS norm (no weights), ReLU, no biases and a separate matrix for the
logits: width 16, 4 heads, 1 layer, 16 positions, 4,192 parameters for 27 symbols. Each step learns
from one document. The model's code ends at `sample`; documents, baselines and the command follow.

**Words.** Without `--data`, the documents are the words of 3 to 15 letters in the names of letters
and syllables in Unicode 3.2, which never change: *alef*, *ssangkiyeok*, *gyaeg*. With `--data
FILE`, each line that is not blank is a document of any symbols; only its first 16 predictions are
used.

**Baselines.** A tenth of the documents (at most 200), chosen by the seed, is held out. A unigram
and a bigram model are counted on the others and smoothed (Witten and Bell 1991). The *window* is
the documents of the last 100 steps: the loss on each is measured before the model learns from it,
but the baselines were counted on these documents too. No model has seen the *held out* documents.
All losses are means over symbols, including the end of a document, in nats.
"""

from __future__ import annotations

import argparse
import io
import json
import math
import os
import platform
import random
import re
import sys
import time
import unicodedata
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NoReturn

# --- reverse-mode differentiation -----------------------------------------------------------------

Number = int | float


class Value:
    """A number, the values it was computed from, and its derivative with respect to each of them.

    >>> x, y = Value(2.0), Value(3.0)
    >>> z = x * y + x.relu() ** 3
    >>> z.backward()
    >>> z.data, x.grad, y.grad                  # 6 + 8;  dz/dx = y + 3x²;  dz/dy = x
    (14.0, 15.0, 2.0)
    """

    __slots__ = ("data", "grad", "inputs", "slopes")

    def __init__(
        self, data: Number, inputs: tuple[Value, ...] = (), slopes: tuple[float, ...] = ()
    ) -> None:
        self.data = data
        self.grad = 0.0
        self.inputs = inputs
        self.slopes = slopes

    def __add__(self, other: Value | Number) -> Value:
        other = other if isinstance(other, Value) else Value(other)
        return Value(self.data + other.data, (self, other), (1.0, 1.0))

    def __mul__(self, other: Value | Number) -> Value:
        other = other if isinstance(other, Value) else Value(other)
        return Value(self.data * other.data, (self, other), (other.data, self.data))

    def __pow__(self, power: Number) -> Value:
        slope = power * math.pow(self.data, power - 1) if power else 0.0
        return Value(math.pow(self.data, power), (self,), (slope,))

    def log(self) -> Value:
        return Value(math.log(self.data), (self,), (1 / self.data,))

    def exp(self) -> Value:
        result = math.exp(self.data)
        return Value(result, (self,), (result,))

    def relu(self) -> Value:
        return Value(max(self.data, 0.0), (self,), (float(self.data > 0),))

    __radd__, __rmul__ = __add__, __mul__

    def __neg__(self) -> Value:
        return self * -1.0

    def __sub__(self, other: Value | Number) -> Value:
        return self + -other

    def __truediv__(self, other: Value | Number) -> Value:
        return self * other**-1

    def __repr__(self) -> str:
        return f"Value({self.data:.6g})"

    def backward(self) -> None:
        """Add d self / d leaf to the `grad` of every leaf in the graph of self."""
        nodes = graph(self)
        for node in nodes:
            if node.inputs:
                node.grad = 0.0
        self.grad += 1.0
        for node in reversed(nodes):
            for source, slope in zip(node.inputs, node.slopes, strict=True):
                source.grad += slope * node.grad


def graph(root: Value) -> list[Value]:
    """Return `root` and all values it was computed from, each after its inputs.

    It is not recursive, so any depth works. `sum(len(n.inputs) for n in graph(loss))` counts the
    multiply-adds of `loss.backward()`; those of the forward pass are about half as many.
    """
    order: list[Value] = []
    met: set[Value] = set()
    stack = [(root, False)]
    while stack:
        node, inputs_done = stack.pop()
        if inputs_done:
            order.append(node)
        elif node not in met:
            met.add(node)
            stack.append((node, True))
            stack.extend((source, False) for source in node.inputs if source not in met)
    return order


def dot(a: Sequence[Value], b: Sequence[Value]) -> Value:
    """Return `a[0] * b[0] + a[1] * b[1] + …` as one value, ten times faster than
    as `2n − 1` values."""
    left, right = [x.data for x in a], [x.data for x in b]
    total = sum(x * y for x, y in zip(left, right, strict=True))
    return Value(total, (*a, *b), (*right, *left))


# --- the layers -----------------------------------------------------------------------------------

Vector = list[Value]
Matrix = list[list[Value]]  # [out][in]


def as_values(rows: Sequence[Sequence[Number]]) -> Matrix:
    """Wrap numbers as values: weights, or a document's vectors."""
    return [[Value(number) for number in row] for row in rows]


def linear(x: Vector, weight: Matrix) -> Vector:
    """Return `weight @ x`: one sum of products per row."""
    return [dot(row, x) for row in weight]


def softmax(scores: Vector) -> Vector:
    """Return `exp(s) / Σ exp(s)`, with the maximum subtracted first so that exp stays finite."""
    top = max(score.data for score in scores)
    exps = [(score - top).exp() for score in scores]
    inverse = sum(exps, Value(0.0)) ** -1
    return [e * inverse for e in exps]


def rmsnorm(x: Vector) -> Vector:
    """Divide x by the root of its mean square, so that its mean square becomes 1."""
    scale = (dot(x, x) * (1 / len(x)) + 1e-5) ** -0.5
    return [value * scale for value in x]


def attention(
    x: Vector,
    wq: Matrix,
    wk: Matrix,
    wv: Matrix,
    wo: Matrix,
    keys: Matrix,
    values: Matrix,
    n_head: int,
) -> Vector:
    """Run multi-head attention for one token: it attends to itself and all earlier ones.

    `keys` and `values` hold a row for each earlier token; the rows of this token are appended.
    No mask is needed, as later tokens have no rows yet.
    """
    query = linear(x, wq)
    if len(query) % n_head:
        raise ValueError(f"n_head must divide the width {len(query)}, got {n_head}")
    keys.append(linear(x, wk))
    values.append(linear(x, wv))
    head_dim = len(query) // n_head
    joined: Vector = []
    for h in range(n_head):
        hs = h * head_dim
        q = query[hs : hs + head_dim]
        scores = [dot(q, key[hs : hs + head_dim]) * head_dim**-0.5 for key in keys]
        weights = softmax(scores)
        joined += [dot(weights, [value[d] for value in values]) for d in range(hs, hs + head_dim)]
    return linear(joined, wo)


def cross_entropy(logits: Vector, target: int) -> Value:
    """Return `−log softmax(logits)[target]`, without the division."""
    top = max(logit.data for logit in logits)
    total = sum(((logit - top).exp() for logit in logits), Value(0.0))
    return total.log() - (logits[target] - top)


# --- the model ------------------------------------------------------------------------------------


class ScalarGPT:
    """A GPT-2 of scalars; `state_dict` holds its matrices `[out][in]` with microgpt's names.

    >>> model = ScalarGPT(vocab_size=27)
    >>> len(model.parameters())
    4192
    >>> keys, values = model.empty(), model.empty()
    >>> logits = model.gpt(26, 0, keys, values)          # of the first token of a document
    >>> len(logits), len(keys[0]), len(keys[0][0])       # 27 symbols; 1 token so far, width 16
    (27, 1, 16)
    """

    def __init__(
        self,
        vocab_size: int,
        *,
        n_embd: int = 16,
        n_head: int = 4,
        n_layer: int = 1,
        block_size: int = 16,
        seed: int = 0,
    ) -> None:
        sizes = (vocab_size, n_embd, n_head, n_layer, block_size)
        if min(sizes) < 1 or n_embd % n_head:
            raise ValueError(
                f"ScalarGPT{sizes}: sizes must be at least 1, and n_head={n_head} divide "
                f"n_embd={n_embd}"
            )
        self.n_head, self.n_layer, self.block_size = n_head, n_layer, block_size
        shapes = {
            "wte": (vocab_size, n_embd),
            "wpe": (block_size, n_embd),
            "lm_head": (vocab_size, n_embd),
        }
        for i in range(n_layer):
            shapes |= {f"layer{i}.attn_w{name}": (n_embd, n_embd) for name in "qkvo"}
            shapes[f"layer{i}.mlp_fc1"] = (4 * n_embd, n_embd)
            shapes[f"layer{i}.mlp_fc2"] = (n_embd, 4 * n_embd)
        draw = random.Random(seed)
        self.state_dict: dict[str, Matrix] = {
            name: as_values([[draw.gauss(0, 0.08) for _ in range(columns)] for _ in range(rows)])
            for name, (rows, columns) in shapes.items()
        }

    def parameters(self) -> list[Value]:
        """Return every weight, matrix by matrix and row by row."""
        return [value for matrix in self.state_dict.values() for row in matrix for value in row]

    def empty(self) -> list[Matrix]:
        """Return the empty keys, or values, of a new document: a list for each layer."""
        return [[] for _ in range(self.n_layer)]

    def gpt(self, token: int, position: int, keys: list[Matrix], values: list[Matrix]) -> Vector:
        """Return the logits of the next token, and append to the keys and values of every layer."""
        w = self.state_dict
        if not (0 <= token < len(w["wte"]) and 0 <= position < self.block_size):
            raise ValueError(
                f"gpt(token={token}, position={position}): the model has {len(w['wte'])} tokens "
                f"and {self.block_size} positions, counted from 0"
            )
        at = w["wte"][token], w["wpe"][position]
        x = rmsnorm([symbol + place for symbol, place in zip(*at, strict=True)])
        for i in range(self.n_layer):
            wq, wk, wv, wo = (w[f"layer{i}.attn_w{name}"] for name in "qkvo")
            a = attention(rmsnorm(x), wq, wk, wv, wo, keys[i], values[i], self.n_head)
            x = [old + new for old, new in zip(x, a, strict=True)]
            hidden = [unit.relu() for unit in linear(rmsnorm(x), w[f"layer{i}.mlp_fc1"])]
            m = linear(hidden, w[f"layer{i}.mlp_fc2"])
            x = [old + new for old, new in zip(x, m, strict=True)]
        return linear(x, w["lm_head"])

    def losses(self, tokens: Sequence[int]) -> list[Value]:
        """Return the loss on each token except the first, given earlier ones, up to the end of the
        block."""
        if len(tokens) < 2:
            raise ValueError(f"losses({list(tokens)}): at least two tokens are required")
        keys, values = self.empty(), self.empty()
        pairs = list(pairwise(tokens))[: self.block_size]
        return [
            cross_entropy(self.gpt(token, position, keys, values), target)
            for position, (token, target) in enumerate(pairs)
        ]


class Adam:
    """Adam (Kingma and Ba 2015): a mean of gradients, divided by the root of a mean of squares."""

    def __init__(self, parameters: list[Value], betas: tuple[float, float] = (0.85, 0.99)) -> None:
        self.parameters, self.betas, self.steps = parameters, betas, 0
        self.means = [0.0] * len(parameters)
        self.squares = [0.0] * len(parameters)

    def step(self, rate: float, eps: float = 1e-8) -> None:
        """Move every parameter against its gradient, and clear the gradients."""
        self.steps += 1
        b1, b2 = self.betas
        for i, p in enumerate(self.parameters):
            self.means[i] = b1 * self.means[i] + (1 - b1) * p.grad
            self.squares[i] = b2 * self.squares[i] + (1 - b2) * p.grad**2
            mean = self.means[i] / (1 - b1**self.steps)
            square = self.squares[i] / (1 - b2**self.steps)
            p.data -= rate * mean / (square**0.5 + eps)
            p.grad = 0.0


def train(
    model: ScalarGPT, documents: Sequence[list[int]], steps: int, rate: float = 0.01
) -> Iterator[list[float]]:
    """Train on one document per step, in order; yield its losses before the step.

    The learning rate falls linearly from `rate` to 0 over the `steps`.
    """
    optimizer = Adam(model.parameters())
    for step in range(steps):
        losses = model.losses(documents[step % len(documents)])
        mean = sum(losses, Value(0.0)) * (1 / len(losses))
        mean.backward()
        optimizer.step(rate * (1 - step / steps))
        yield [loss.data for loss in losses]


def sample(model: ScalarGPT, start: int, temperature: float, draw: random.Random) -> list[int]:
    """Generate the tokens of a document, until `start` is chosen again or the block is full.

    Logits are divided by the temperature; 0 selects the most likely token.
    """
    keys, values = model.empty(), model.empty()
    tokens = [start]
    for position in range(model.block_size):
        logits = model.gpt(tokens[-1], position, keys, values)
        if temperature == 0:
            best = max(range(len(logits)), key=lambda i: logits[i].data)
        else:
            weights = softmax([logit * (1 / temperature) for logit in logits])
            best = draw.choices(range(len(logits)), [weight.data for weight in weights])[0]
        if best == start:
            break
        tokens.append(best)
    return tokens[1:]


# --- documents and baselines ----------------------------------------------------------------------


def unicode_words() -> list[str]:
    """Return the words of 3 to 15 letters in Unicode 3.2's names of letters and syllables, sorted.

    >>> words = unicode_words()
    >>> len(words), words[1000], words[4000], "alef" in words
    (12867, 'bwael', 'ggyam', True)
    """
    words: set[str] = set()
    for code in range(sys.maxunicode + 1):
        name = unicodedata.ucd_3_2_0.name(chr(code), "")
        if "LETTER" in name or "SYLLAB" in name:
            words.update(re.findall("[a-z]+", name.lower()))
    return sorted(word for word in words if 3 <= len(word) <= 15)


def read_documents(path: Path) -> list[str]:
    """Return the lines of a UTF-8 file that are not blank, without the spaces around them."""
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 text (byte {error.start} is invalid)") from None
    documents = [line.strip() for line in lines if line.strip()]
    if len(documents) < 2:
        raise ValueError(
            f"{path} must have at least two lines that are not blank, one to train on and one "
            f"to hold out, got {len(documents)}"
        )
    return documents


class Baseline:
    """A bigram model counted on documents, or, with `history=False`, a unigram model.

    Smoothing is by Witten and Bell: if N tokens, n of them different, followed a token, a fraction
    `n / (n + N)` of the probability is spread in proportion to the unigram model, which is smoothed
    in the same way with a uniform distribution.
    """

    def __init__(self, documents: Sequence[list[int]], vocab_size: int, history: bool) -> None:
        tokens = [token for document in documents for token in document[1:]]
        pairs = [pair for document in documents for pair in pairwise(document)]
        self.vocab_size, self.history = vocab_size, history
        self.once, self.total = Counter(tokens), len(tokens)
        self.pairs, self.befores = Counter(pairs), Counter(before for before, _ in pairs)
        self.followers = Counter(before for before, _ in self.pairs)

    def probability(self, before: int, token: int) -> float:
        """Return the probability of `token` after `before`."""
        new = len(self.once)
        p = (self.once[token] + new / self.vocab_size) / (self.total + new)
        if not (self.history and self.befores[before]):
            return p
        new = self.followers[before]
        return (self.pairs[before, token] + new * p) / (self.befores[before] + new)

    def losses(self, document: list[int]) -> list[float]:
        """Return the loss on each token except the first, as `ScalarGPT.losses` does."""
        return [-math.log(self.probability(*pair)) for pair in pairwise(document)]


# --- the command ----------------------------------------------------------------------------------

WINDOW = 100
HELD_OUT = 200


def run(
    texts: Sequence[str],
    *,
    steps: int,
    seed: int,
    samples: int,
    temperature: float,
    kind: type[ScalarGPT] = ScalarGPT,
) -> dict[str, object]:
    """Train on the texts, print losses and samples, and return the metrics."""
    symbols = sorted(set("".join(texts)))
    start = len(symbols)  # one token begins and ends every document
    place = {symbol: i for i, symbol in enumerate(symbols)}
    model, draw = kind(start + 1, seed=seed), random.Random(seed)

    order = draw.sample(texts, len(texts))
    tokens = [[start, *map(place.__getitem__, text), start] for text in order]
    tokens = [document[: model.block_size + 1] for document in tokens]
    held = min(max(1, len(tokens) // 10), HELD_OUT)
    held_out, documents = tokens[:held], tokens[held:]
    unigram, bigram = (Baseline(documents, start + 1, history) for history in (False, True))

    def compare(seen: Sequence[list[int]], losses: Sequence[list[float]]) -> dict[str, float]:
        rivals = {"unigram": map(unigram.losses, seen), "bigram": map(bigram.losses, seen)}
        return {name: mean(each) for name, each in {"loss": losses, **rivals}.items()}

    sizes = {"documents": len(texts), "held out": held, "symbols": start + 1}
    sizes |= {"parameters": len(model.parameters())}
    print(", ".join(f"{size:,} {name}" for name, size in sizes.items()))
    recent: deque[tuple[list[int], list[float]]] = deque(maxlen=WINDOW)
    began, seconds, window = time.perf_counter(), 0.0, {}
    for step, losses in enumerate(train(model, documents, steps), 1):
        seconds = time.perf_counter() - began
        passing(f"step {step:,} of {steps:,}, {seconds * (steps - step) / step:.0f} s left")
        recent.append((documents[(step - 1) % len(documents)], losses))
        if step % WINDOW == 0 or step == steps:
            window = compare(*zip(*recent, strict=True))
            passing("")
            print(f"step {step:7,}   window   {len(recent):3}   {shown(window)}", flush=True)

    passing("measuring on the held-out documents")
    unseen = compare(held_out, [[x.data for x in model.losses(each)] for each in held_out])
    passing("")
    print(f"after {seconds:4.0f} s   held out {held:3}   {shown(unseen)}")
    written = [sample(model, start, temperature, draw) for _ in range(samples)]
    lines = ["".join(symbols[token] for token in each) for each in written]
    for line in lines:
        print("".join(symbol if symbol.isprintable() else "?" for symbol in line))
    metrics = {"seconds": seconds, "window": window, "held_out": unseen, "samples": lines}
    return {"sizes": sizes, **metrics}


def mean(losses: Iterable[list[float]]) -> float:
    """Return the mean over all symbols of all documents."""
    flat = [loss for document in losses for loss in document]
    return sum(flat) / len(flat)


def shown(metrics: dict[str, float]) -> str:
    return "   ".join(f"{name} {value:.3f}" for name, value in metrics.items())


def passing(text: str) -> None:
    """Print a line on the terminal that the next one overwrites."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


def record(path: Path, settings: dict[str, object], metrics: dict[str, object]) -> None:
    """Save a run and a description of the machine as JSON."""
    info = Path("/proc/cpuinfo")
    model = re.search("model name.*: (.*)", info.read_text()) if info.exists() else None
    machine = {"cpu": model[1] if model else platform.machine(), "cores": os.cpu_count()}
    machine["python"] = platform.python_version()
    date = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    head = {"benchmark": "scalar", "date": date, "machine": machine, "settings": settings}
    path.write_text(json.dumps(head | metrics, indent=1, ensure_ascii=False) + "\n", "utf-8")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Parse the options; for invalid ones, print one line and exit with code 2."""
    parser = _Parser(
        prog="headwise.systems.scalar",
        description="Train a GPT of 4,192 parameters in plain Python.",
        epilog="Example: python -m headwise.systems.scalar --steps 1000 --temperature 0.5",
    )
    add = parser.add_argument
    add("--data", type=Path, metavar="FILE", help="one document per line (words of Unicode 3.2)")
    add("--steps", type=int, default=1000, help="number of documents to train on (1000)")
    add("--seed", type=int, default=0, help="seed of weights, order and samples (0)")
    add("--samples", type=int, default=20, help="number of documents to generate at the end (20)")
    add("--temperature", type=float, default=0.5, help="of samples; 0: the most likely token (0.5)")
    add("--record", type=Path, metavar="FILE", help="save the metrics of the run as JSON")
    options = parser.parse_args(arguments)
    for name, least in {"steps": 1, "samples": 0, "temperature": 0}.items():
        if not least <= getattr(options, name) < math.inf:
            parser.error(f"--{name} must be at least {least}, got {getattr(options, name)}")
    if options.record and (options.record.is_dir() or not options.record.parent.is_dir()):
        parser.error(f"--record {options.record}: the file cannot be written")
    return options


def main(arguments: list[str] | None = None) -> int:
    """Run the command; return 0 on success, 2 for bad input, 130 after Ctrl-C."""
    options = parse(arguments)
    settings = {
        name: getattr(options, name) for name in ("steps", "seed", "samples", "temperature")
    }
    try:
        texts = read_documents(options.data) if options.data else unicode_words()
        metrics = run(texts, **settings)
        if options.record:
            data = options.data.name if options.data else "words of Unicode 3.2"
            record(options.record, {"data": data, **settings}, metrics)
    except KeyboardInterrupt:
        passing("")
        print("headwise.systems.scalar: stopped", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of the pipe, such as `head`, closed it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (OSError, ValueError) as error:
        print(f"headwise.systems.scalar: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(
            errors="backslashreplace"
        )  # samples may have symbols it cannot encode
    sys.exit(main())
