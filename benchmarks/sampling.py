"""How honest the standard errors of drawn queries are, head by head.

A model is watched once with all queries and then with drawn ones, with a new seed each time. Of
every statistic: the share of drawn means that lie within three standard errors of the mean of all,
over all heads and of the worst one; and the mean error over the deviation that is seen, over all
heads and the largest. "exact" says that tables had the mean of all queries.

    python benchmarks/sampling.py                      # the built-in model
    python benchmarks/sampling.py --model FOLDER       # an encoder of transformers
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
from torch import Tensor, nn

import headwise as hw
from headwise.models import gpt
from headwise.models.data import encode, manual, manual_passage

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


def main() -> None:
    """Take the table of each route."""
    parser = argparse.ArgumentParser(description="Hold standard errors against what they say.")
    parser.add_argument("--model", help="a folder of transformers (default: the built-in model)")
    parser.add_argument("--length", type=int, default=128, help="tokens of the text")
    parser.add_argument("--queries", type=int, default=64)
    parser.add_argument("--seeds", type=int, default=200)
    options = parser.parse_args()
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
