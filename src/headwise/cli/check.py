"""`headwise check`: a verdict on a file."""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from .terminal import ignore_broken_pipe

if TYPE_CHECKING:
    from ..check.sandbox import Limits, Report
    from ..check.verdict import Verdict

USUAL = "attention.py:MyAttention"
OPTIONS = ("step", "new", "explain", "hint", "timeout", "memory", "json", "all")


def check(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="FILE.py[:Name] [--ARGUMENT VALUE]...",
            help="The file, the class or function in it, and arguments of its constructor.",
            show_default=False,
        ),
    ] = None,
    step: Annotated[
        str | None,
        typer.Option(help="Follow a step: scalar, per_head, split or gpt2 (on MAX gpt2-max)."),
    ] = None,
    new: Annotated[
        str | None, typer.Option(help="Write FILE.py, a step's file with blanks to fill in.")
    ] = None,
    explain: Annotated[
        str | None, typer.Option(metavar="RULE", help="A lesson on one rule; `rules` lists them.")
    ] = None,
    hint: Annotated[
        int | None,
        typer.Option(
            metavar="1|2|3",
            help="With --step: hints that say what a line does, how, or show it. [default: 1]",
        ),
    ] = None,
    arg: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="An argument, in another way; may be given again."),
    ] = None,
    call: Annotated[
        str | None,
        typer.Option(
            metavar="LAMBDA",
            help='One call: "lambda layer, x, keep: layer(x, mask=keep)"; what it names of memory, '
            "keep, allow, start and past is tested.",
        ),
    ] = None,
    timeout: Annotated[
        float | None, typer.Option(help="Seconds the file may take. [default: 60]")
    ] = None,
    memory: Annotated[
        float | None, typer.Option(help="GiB of memory the file may take. [default: 4]")
    ] = None,
    every: Annotated[
        bool, typer.Option("--all", help="Print every rule, and the inputs that show a mistake.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the verdict as one JSON object.")
    ] = False,
) -> int:
    """Check an attention layer that you wrote: say what is wrong, where, and what to change.

    The file runs in a process of its own, with limits on time and memory. Exit code 0: no mistakes
    found; 1: a mistake; 2: bad input, or one call has to be shown.

    Example: `headwise check attention.py:MultiHeadAttention --d_in 24 --num_heads 3`
    """
    from ..check.files import check_file  # other commands start sooner without these
    from ..check.rules import ALL
    from ..check.rules import explain as lesson
    from ..check.sandbox import Limits

    modes = [
        f"--{name}"
        for name, value in zip(("step", "new", "explain"), (step, new, explain), strict=True)
        if value is not None
    ]
    if hint is not None and step is None:
        raise ValueError(f"--hint {hint}: goes with --step; as in: --step split mine.py --hint 2")
    if len(modes) > 1:
        raise ValueError(f"{' and '.join(modes)}: give one of them")
    if explain is not None:
        if words or arg:
            raise ValueError(f"--explain {explain}: takes nothing beside it")
        listed = (f"{name}: {rule.statement}" for name, rule in ALL.items())
        print("\n".join(listed) if explain.lower() == "rules" else lesson(explain.lower()))
        return 0
    example = f"{modes[0]} {step or new} mine.py" if modes else USUAL
    if step is not None and not words and Path(step).suffix == ".py":
        follow = _step_of(step).replace("or follow its step", "for this file")
        raise ValueError(
            f"--step {step}: is a file, and no step; the steps are {', '.join(_steps().STEPS)}"
            f"{follow or f'; as in: headwise check --step split {step}'}"
        )
    target, values = parsed(words or [], arg or [], example)
    if call is not None and modes:
        raise ValueError(f"{modes[0]}: takes no --call; leave it out")
    if values and modes:
        raise ValueError(
            f"{modes[0]}: takes no arguments of a constructor; leave out {', '.join(values)}"
        )
    if new is not None:
        _steps().write_template(new, Path(target))
        print(f"{target}: replace every None, then: headwise check --step {new} {target}")
        return 0

    def limited(usual: Limits) -> Limits:
        changes = {"seconds": timeout, "memory": memory}
        return replace(
            usual, **{name: value for name, value in changes.items() if value is not None}
        )

    with _waiting() as report:
        if step is not None:
            limits = limited(_steps().usual_limits(step, target))
            verdict = _steps().check_step(step, target, limits, report, 1 if hint is None else hint)
        else:
            try:
                verdict = check_file(target, values, limited(Limits()), report, call)
            except ValueError as error:
                if "\n" in str(error):  # a question, with the lambda to copy
                    print(f"headwise: {error}", file=sys.stderr)
                    return 2
                raise ValueError(f"{error}{_step_of(target)}") from None
    with ignore_broken_pipe():  # the exit code is an answer
        show(verdict, as_json, every)
    return 0 if verdict.passed else 1


def _steps() -> ModuleType:
    """Return the module of the steps, which takes a while to import."""
    from ..check import steps

    return steps


def choices(option: str) -> list[str]:
    """Return a message for `--step`, `--new` or `--explain` alone: its use, and a line for each
    value; empty for other options."""
    if option not in ("--step", "--new", "--explain"):
        return []
    from ..check.rules import ALL
    from ..check.steps import STEPS, summary

    use, rows = "head-split", {name: rule.statement for name, rule in ALL.items()}
    if option != "--explain":
        use, rows = "gpt2 mine.py", {name: summary(name) for name in STEPS}
    wide = max(map(len, rows))
    listed = [f"  {name:{wide}}  {statement}" for name, statement in rows.items()]
    return [f"{option}: name one of these, as in: headwise check {option} {use}", *listed]


def _step_of(target: str) -> str:
    """Return the command that follows a step, if the file is a step's: its docstring says so."""
    path = Path(target)
    text = path.read_text("utf-8", "ignore") if path.is_file() else ""
    match = re.search(r"headwise check --step (\S+) ", text)
    return f"; or follow its step: headwise check --step {match[1]} {target}" if match else ""


def parsed(
    words: Sequence[str], arguments: Sequence[str], usual: str = USUAL
) -> tuple[str, dict[str, str]]:
    """Return the file and the constructor's arguments; `usual` is an example of them.

    Raises:
        ValueError: no file, or several; an argument without a value; an option that is misspelt.

    >>> parsed(["mha.py", "--d_in", "24", "--num-heads=3"], ["causal=true"])
    ('mha.py', {'d_in': '24', 'num_heads': '3', 'causal': 'true'})
    """
    files, values, rest = [], {}, list(words)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--"):
            files.append(word)
            continue
        name, equals, value = word[2:].partition("=")
        if near := difflib.get_close_matches(name, OPTIONS, n=1, cutoff=0.75):
            raise ValueError(
                f"{word}: no such option; did you mean --{near[0]}? "
                f"An argument of that name goes by --arg {name}=VALUE"
            )
        if not equals and (not rest or rest[0].startswith("--")):
            raise ValueError(
                f"{word}: no such option; an argument of the constructor needs a value, "
                f"as in {word} 24"
            )
        values[name] = value if equals else rest.pop(0)
    for text in arguments:
        name, equals, value = text.partition("=")
        if not equals:
            raise ValueError(f"--arg {text}: give a name and a value, as in --arg num_heads=3")
        values[name] = value
    if len(files) != 1:
        fault = "no file was named" if not files else f"{' '.join(files)}: one file at a time"
        raise ValueError(f"{fault}; as in: headwise check {usual}")
    values = {name.replace("-", "_"): value for name, value in values.items()}
    bad = [name for name in values if not name.isidentifier()]
    if bad:
        raise ValueError(f"{', '.join(bad)}: is no name of an argument")
    return files[0], values


def show(verdict: Verdict, as_json: bool, every: bool = False) -> None:
    """Print a verdict: for programs, in colour on a terminal, or as plain lines."""
    if as_json:
        print(verdict.to_json())
        return
    if sys.stdout.isatty():
        from ..check.verdict import coloured

        lines = coloured(verdict.lines(every), "red" if verdict.errors else "green")
        Console().print(lines, soft_wrap=True)
    else:
        print("\n".join(verdict.lines(every)).rstrip())
    if verdict.findings:
        print(f"\nWhy? headwise check --explain {verdict.findings[0].rule}")


@contextmanager
def _waiting() -> Iterator[Report]:
    """Show the elapsed time on a terminal."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda seconds: None
        return
    status = console.status("checking …")

    def report(seconds: float) -> None:
        status.start()  # not before the sandbox runs: it has a thread
        status.update(f"checking … {seconds:.0f} s")

    try:
        yield report
    finally:
        status.stop()
