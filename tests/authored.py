"""Layers in files of their own: texts that are loaded, and those that others wrote.

Others wrote `check/authors` without having seen the checker, in many styles. `authors.tsv` says of
each what is wrong with it and what the check says: `named` where the first finding is of the rule
that stands there, `caught` where something else is found wrong, `missed` where nothing is, `asked`
where it asks for a call; and `right` where nothing should be found. What is missed is written down
like all else, so that it is seen when it changes.
"""

from __future__ import annotations

import importlib.util
import sys
from itertools import count
from pathlib import Path
from typing import Any

from headwise.check.files import chosen

HERE = Path(__file__).parent / "check" / "authors"
NUMBER = count()


def loaded(text: str, folder: Path, name: str | None = None) -> tuple[Any, dict[str, Any]]:
    """Return what is to be checked in a text, as if from a file of its own, and all its names."""
    path = folder / f"of_a_test_{next(NUMBER)}.py"
    path.write_text(text, "utf-8")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # where `inspect` looks for a class's file
    spec.loader.exec_module(module)
    return chosen(module, path, name), vars(module)
