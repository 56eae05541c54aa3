"""How honest the standard errors of drawn queries are, head by head.

A model is watched once with all queries and then with drawn ones, with a new seed each time. Of
every statistic: the share of drawn means that lie within three standard errors of the mean of all,
over all heads and of the worst one; and the mean error over the deviation that is seen, over all
heads and the largest. "exact" says that tables had the mean of all queries.

    python benchmarks/sampling.py                      # the built-in model
    python benchmarks/sampling.py --model FOLDER       # an encoder of transformers
    python benchmarks/sampling.py --grid               # lengths × numbers of queries, beside `sdpa`

The grid is of random heads and of the built-in model's, on one text after another: all figures are
worked out once, and drawn from them by each seed.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Sequence

import torch
from torch import Tensor, nn

import headwise as hw
from headwise.models import gpt
from headwise.models.corpus import encode, manual, manual_passage
from headwise.stats.record import Reading
from headwise.stats.sampling import draw
from headwise.stats.tables import summarise

ROUND = 2e-5
"""By how much a mean of all queries may differ by rounding, as a share of itself and one."""


def models(folder: str | None, length: int) -> list[tuple[str, nn.Module, Tensor]]:
    """What is watched, and what it reads: the built-in model twice, or the model of a folder."""
    from transformers import AutoModel, AutoTokenizer, GPT2LMHeadModel

    if folder is None:
        own, tokenizer = gpt.load(gpt.builtin())
        ids = encode(tokenizer, manual_passage(), "the passage")[:length]
        found = {"own layer": own, "transformers": GPT2LMHeadModel.from_pretrained(gpt.builtin())}
    else:
        text = "\n".join(manual().train)[:60_000]
        ids = AutoTokenizer.from_pretrained(folder)(text, truncation=True, max_length=length)
        ids = ids["input_ids"]
        found = {"transformers": AutoModel.from_pretrained(folder)}
    return [(name, model.eval(), torch.tensor([ids])) for name, model in found.items()]


def table(
    model: nn.Module,
    ids: Tensor,
    statistics: Sequence[hw.Statistic],
    queries: int | None = None,
    seed: int = 0,
) -> dict[str, Tensor]:
    """The columns of a watched forward, a number for each head."""
    with torch.no_grad(), hw.watch(model, *statistics, queries=queries, seed=seed) as seen:
        model(ids)
    rows = seen.table()
    names = [name for name, value in rows[0].items() if isinstance(value, float)]
    return {name: torch.tensor([row[name] for row in rows]).double() for name in names}


def line(name: str, whole: Tensor, means: Tensor, errors: Tensor | None) -> str:
    """What is to be said of a statistic; `means` and `errors` are `[seeds, heads]`."""
    off = means - whole
    if errors is None:
        rounding = bool((off.abs() <= ROUND * (1 + whole.abs())).all())
        return f"| {name} | {'exact' if rounding else 'WRONG'} | | | |"
    within = (off.abs() <= 3 * errors + ROUND * (1 + whole.abs())).double()
    seen = off.square().mean(0).sqrt()
    ratio = (errors.mean(0) / seen)[seen > ROUND]
    return (
        f"| {name} | {100 * within.mean():.1f} % | {100 * within.mean(0).min():.1f} % "
        f"| {ratio.mean():.2f} | {ratio.max():.2f} |"
    )


def random_heads(length: int) -> tuple[Tensor, Tensor]:
    """Queries and keys of eight heads, of numbers that are drawn."""
    q, k = torch.randn(2, 1, 8, length, 16, generator=torch.Generator().manual_seed(0))
    return q, k


def heads_of_builtin(length: int) -> tuple[Tensor, Tensor]:
    """Queries and keys of every head of the built-in model, its contexts one after another."""
    model, tokenizer = gpt.load(gpt.builtin())
    text = "\n".join(manual().train)[: 8 * length]
    ids = torch.tensor(encode(tokenizer, text, "the text")[:length])
    made: list[tuple[Tensor, Tensor]] = []

    def keep(layer: hw.MultiHeadAttention, given: tuple[Tensor]) -> None:
        made.append(layer._project(given[0], None)[:2])

    layers = [one for one in model.modules() if isinstance(one, hw.MultiHeadAttention)]
    hooks = [layer.register_forward_pre_hook(keep) for layer in layers]
    with torch.no_grad():
        for context in ids.split(model.config.n_positions):
            model(context[None])
    for hook in hooks:
        hook.remove()
    of_layers = [zip(*made[n :: len(layers)], strict=True) for n in range(len(layers))]
    joined = [[torch.cat(each, dim=2) for each in pairs] for pairs in of_layers]
    q, k = (torch.cat(each, dim=1) for each in zip(*joined, strict=True))
    return q, k


def grid(seeds: int) -> None:
    """Print a line for each kind of heads, statistic, length and number of queries."""
    patterns = hw.First(), hw.Previous(), hw.Self()
    asked = [hw.Entropy(), hw.Distance(), *map(hw.Mass, patterns)]
    asked += [hw.Mass(hw.Window(n), name=f"window {n}") for n in (4, 64)]
    print("| statistic | within 3 SE | worst head | SE / seen | largest |\n" + "|---" * 5 + "|")
    for make, length in itertools.product((random_heads, heads_of_builtin), LENGTHS):
        q, k = make(length)
        whole = hw.observe(q, k, k, *asked, mask=hw.Causal())
        for queries in (n for n in NUMBERS if n < length):
            drawn = {"queries": queries, "backend": "sdpa"}
            row = hw.observe(q, k, k, *asked, mask=hw.Causal(), **drawn).table()[0]
            for name in ("entropy", "distance", *(x.names[0] for x in asked[2:])):
                where = f"{make.__name__}, T {length}, {queries} queries: {name}"
                every = whole.reading(name)
                truth = summarise([every])
                assert truth is not None
                if f"{name}_se" not in row:
                    print(f"| {where} | exact | | | |")
                    continue
                found = [_drawn(every, queries, seed) for seed in range(seeds)]
                means, errors = (torch.stack(each) for each in zip(*found, strict=True))
                print(line(where, truth.mean, means, errors))


def _drawn(every: Reading, queries: int, seed: int) -> tuple[Tensor, Tensor]:
    """The mean of each head from drawn queries, and its standard error."""
    sample = draw(queries, every.values.shape[2], seed, every.values.device)
    assert sample is not None
    assert every.rows is not None
    rows = every.rows.expand(every.values.shape)[:, :, sample.rows]
    some = Reading(every.values[:, :, sample.rows], rows)
    figure = summarise([some.of_some(None, sample.weights)])
    assert figure is not None
    assert figure.error is not None
    return figure.mean, figure.error


LENGTHS, NUMBERS = (200, 500, 1000, 2000, 4000), (32, 64, 128, 256)


def main() -> None:
    """Take the table of each route."""
    parser = argparse.ArgumentParser(description="Hold standard errors against what they say.")
    parser.add_argument("--model", help="a folder of transformers (default: the built-in model)")
    parser.add_argument("--length", type=int, default=128, help="tokens of the text")
    parser.add_argument("--queries", type=int, default=64)
    parser.add_argument("--seeds", type=int, default=200)
    parser.add_argument("--grid", action="store_true", help="lengths × numbers of queries")
    options = parser.parse_args()
    if options.grid:
        grid(options.seeds)
        return
    for route, model, ids in models(options.model, options.length):
        patterns = hw.First(), hw.Previous(), hw.Self(), hw.SameToken(ids), hw.Induction(ids)
        masses = [hw.Mass(pattern) for pattern in patterns]
        for asked in ([hw.Entropy(), hw.Distance()], [hw.Entropy(), hw.Distance(), *masses]):
            whole = table(model, ids, asked)
            drawn = [
                table(model, ids, asked, queries=options.queries, seed=seed)
                for seed in range(options.seeds)
            ]
            length = ids.shape[1]
            print(f"\n{route}: {options.queries} of {length} queries, {options.seeds} seeds")
            print(
                "| statistic | within 3 SE | worst head | SE / seen | largest |\n"
                + "|---" * 5
                + "|"
            )
            for name in (name for statistic in asked for name in statistic.names):
                means = torch.stack([one[name] for one in drawn])
                errors = [one[f"{name}_se"] for one in drawn if f"{name}_se" in one]
                told = torch.stack(errors) if len(errors) == len(drawn) else None
                print(line(name, whole[name], means, told))


if __name__ == "__main__":
    main()
