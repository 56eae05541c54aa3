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
            help="The file, the class or function in it, and constructor arguments.",
            show_default=False,
        ),
    ] = None,
    step: Annotated[
        str | None,
        typer.Option(help="Check a step: scalar, per_head, split, gpt2 or gpt2-max (Modular MAX)."),
    ] = None,
    new: Annotated[
        str | None, typer.Option(help="Write the template of a step, with blanks, to FILE.py.")
    ] = None,
    explain: Annotated[
        str | None, typer.Option(metavar="RULE", help="Explain one rule; `rules` lists them all.")
    ] = None,
    hint: Annotated[
        int | None,
        typer.Option(
            metavar="1|2|3",
            help="With --step: 1 describes the result of a line, 2 its computation, 3 shows the "
            "line. [default: 1]",
        ),
    ] = None,
    arg: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="A constructor argument; repeatable."),
    ] = None,
    call: Annotated[
        str | None,
        typer.Option(
            metavar="LAMBDA",
            help='An example call: "lambda layer, x, keep: layer(x, mask=keep)". Its parameters '
            "(memory, keep, allow, start, past) select the tests.",
        ),
    ] = None,
    timeout: Annotated[
        float | None, typer.Option(help="Time limit for the file, in seconds. [default: 60]")
    ] = None,
    memory: Annotated[
        float | None, typer.Option(help="Memory limit for the file, in GiB. [default: 4]")
    ] = None,
    every: Annotated[
        bool, typer.Option("--all", help="Print every rule, and inputs that reveal the mistakes.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the verdict as one JSON object.")
    ] = False,
) -> int:
    """Check an attention layer that you wrote: name each mistake, its line, and a fix.

    The file runs in a separate process, with limits on time and memory. Exit code 0: no mistakes
    found; 1: a mistake; 2: bad input, or an example call is needed.

    Example: `headwise check attention.py:MultiHeadAttention --d_in 24 --num_heads 3`
    """
    from ..check.files import check_file  # other commands start sooner without these
    from ..check.rules import ALL
    from ..check.rules import explain as lesson
    from ..check.sandbox import Limits

    given = {"--step": step, "--new": new, "--explain": explain}
    modes = [name for name, value in given.items() if value is not None]
    if hint is not None and step is None:
        raise ValueError(f"--hint {hint}: needs --step, as in: --step split mine.py --hint 2")
    if len(modes) > 1:
        raise ValueError(f"{' and '.join(modes)}: give only one of them")
    if explain is not None:
        if words or arg:
            raise ValueError(f"--explain {explain}: takes no file and no arguments")
        listed = (f"{name}: {rule.statement}" for name, rule in ALL.items())
        print("\n".join(listed) if explain.lower() == "rules" else lesson(explain.lower()))
        return 0
    example = f"{modes[0]} {step or new} mine.py" if modes else USUAL
    if step is not None and not words and Path(step).suffix == ".py":
        follow = _step_of(step).replace("or check its step", "for this file")
        raise ValueError(
            f"--step {step}: is a file, not a step; the steps are {', '.join(_steps().STEPS)}"
            f"{follow or f', as in: headwise check --step split {step}'}"
        )
    target, values = parsed(words or [], arg or [], example)
    if call is not None and modes:
        raise ValueError(f"{modes[0]} and --call: give only one of them")
    if values and modes:
        raise ValueError(
            f"{modes[0]}: takes no constructor arguments; leave out {', '.join(values)}"
        )
    if new is not None:
        _steps().write_template(new, Path(target))
        print(f"{target}: replace every None, then: headwise check --step {new} {target}")
        return 0

    def limited(usual: Limits) -> Limits:
        changes = {"seconds": timeout, "memory": memory}.items()
        return replace(usual, **{name: value for name, value in changes if value is not None})

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
    with ignore_broken_pipe():  # the exit code must still report the verdict
        show(verdict, as_json, every)
    return 0 if verdict.passed else 1


def _steps() -> ModuleType:
    """Import and return the module of the steps, which is slow to import."""
    from ..check import steps

    return steps


def choices(option: str) -> list[str]:
    """Return the lines of the message for `--step`, `--new` or `--explain` without a value: an
    example, and a line for each value. Empty for other options."""
    if option not in ("--step", "--new", "--explain"):
        return []
    from ..check.rules import ALL
    from ..check.steps import STEPS, summary

    use, rows = "head-split", {name: rule.statement for name, rule in ALL.items()}
    if option != "--explain":
        use, rows = "gpt2 mine.py", {name: summary(name) for name in STEPS}
    wide = max(map(len, rows))
    listed = [f"  {name:{wide}}  {statement}" for name, statement in rows.items()]
    return [f"{option}: give one of these values, as in: headwise check {option} {use}", *listed]


def _step_of(target: str) -> str:
    """Return the check command quoted in a step file's docstring; empty for other files."""
    path = Path(target)
    text = path.read_text("utf-8", "ignore") if path.is_file() else ""
    match = re.search(r"headwise check --step (\S+) ", text)
    return f"; or check its step: headwise check --step {match[1]} {target}" if match else ""


def parsed(
    words: Sequence[str], arguments: Sequence[str], usual: str = USUAL
) -> tuple[str, dict[str, str]]:
    """Return the file and the constructor arguments; errors quote `usual` as an example.

    Raises:
        ValueError: no file, or several; an argument without a value; a misspelled option.

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
                f"If it is a constructor argument, use --arg {name}=VALUE"
            )
        if not equals and (not rest or rest[0].startswith("--")):
            raise ValueError(
                f"{word}: no such option; a constructor argument needs a value, as in {word} 24"
            )
        values[name] = value if equals else rest.pop(0)
    for text in arguments:
        name, equals, value = text.partition("=")
        if not equals:
            raise ValueError(f"--arg {text}: give a name and a value, as in --arg num_heads=3")
        values[name] = value
    if len(files) != 1:
        fault = "no file was given" if not files else f"{' '.join(files)}: give only one file"
        raise ValueError(f"{fault}, as in: headwise check {usual}")
    values = {name.replace("-", "_"): value for name, value in values.items()}
    bad = [name for name in values if not name.isidentifier()]
    if bad:
        raise ValueError(f"{', '.join(bad)}: not a valid argument name")
    return files[0], values


def show(verdict: Verdict, as_json: bool, every: bool = False) -> None:
    """Print a verdict: as JSON, in color on a terminal, or as plain lines."""
    if as_json:
        print(verdict.to_json())
        return
    if sys.stdout.isatty():
        from ..check.verdict import colored

        lines = colored(verdict.lines(every), "red" if verdict.errors else "green")
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
        status.start()  # only after the sandbox has started, as this starts a thread
        status.update(f"checking … {seconds:.0f} s")

    try:
        yield report
    finally:
        status.stop()
