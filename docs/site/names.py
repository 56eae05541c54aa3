"""The public names, where the API's pages document them, and what is missing there.

A page under `docs/api/` has a line `::: headwise.NAME` for each name. A name needs a docstring, and
an example: in the docstring, or on the page between its line and the next.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

API = Path(__file__).parents[1] / "api"
MODULES = {
    "headwise": "headwise",
    "headwise.stats": "headwise.stats",
    "headwise.capture": "headwise.capture",
    "headwise.integrations": "headwise.integrations",
    "headwise.parallel": "headwise.parallel",
    "headwise.telemetry": "headwise.telemetry",
    "headwise.testing": "headwise.testing",
    "headwise.report": "headwise.report.head_labels",
    "headwise.research": "headwise.research",
    "headwise.models": "headwise.models.gpt",
}
"""What users import, and the module whose `__all__` says what is public in it."""

FURTHER = (
    "headwise.check.Verdict",
    "headwise.models.builtin",
    "headwise.models.corpus.manual",
    "headwise.models.corpus.repeated_tokens",
    "headwise.models.corpus.train_tokenizer",
    "headwise.report.Trace",
    "headwise.report.faithfulness",
    "headwise.report.fit_weights",
)
"""Names that pages of docs/ use, of modules that list none."""

_ENTRY = re.compile(r"^::: (headwise\.[\w.]+)$", re.MULTILINE)


def public() -> dict[str, Any]:
    """Every public object by its name; one that several modules have, by its first name here."""
    listed = ((short, import_module(at).__all__) for short, at in MODULES.items())
    names = [f"{short}.{name}" for short, names in listed for name in names]
    found: dict[str, Any] = {}
    for name in [*names, *FURTHER]:
        module, _, last = name.rpartition(".")
        thing = getattr(import_module(module), last)
        if not any(thing is one for one in found.values()):
            found[name] = thing
    return found


def documented(folder: Path = API) -> Iterator[tuple[str, str]]:
    """The names on the API's pages, each with the text between it and the next."""
    for page in sorted(folder.glob("*.md")):
        parts = _ENTRY.split(page.read_text("utf-8"))[1:]
        yield from zip(parts[::2], parts[1::2], strict=True)


def faults(names: Mapping[str, Any], entries: list[tuple[str, str]]) -> list[str]:
    """What is wrong, a line each: a name left out, unknown or twice; no docstring, no example."""
    texts = dict(entries)
    unknown = sorted(texts.keys() - names.keys())
    found = [f"docs/api has `::: {name}`, which is not public" for name in unknown]
    for name, thing in names.items():
        count = sum(name == one for one, _ in entries)
        if count != 1:
            found.append(f"{name} stands {count} times in docs/api; write `::: {name}` once")
            continue
        if _has_docstring(thing) and not thing.__doc__:
            found.append(f"{name} has no docstring")
        if ">>>" not in (thing.__doc__ or "") + texts[name]:
            found.append(f"{name} has no example, neither in its docstring nor in docs/api")
    return found


def path_of(name: str, thing: Any) -> str:
    """Where a name is defined; `headwise.attend`, say, is a function and a module."""
    return f"{thing.__module__}.{thing.__qualname__}" if _has_docstring(thing) else name


def _has_docstring(thing: Any) -> bool:
    """Whether it can have one of its own; constants cannot."""
    return isinstance(thing, type) or inspect.isroutine(thing)
