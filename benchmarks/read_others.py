"""What `headwise check` reads off public code, without building or calling any of it.

    python benchmarks/read_others.py FOLDER [FOLDER …] [--rules softmax scale]

Every class and function of every file is read by every reader. What is printed of code that many
people use is most likely a false alarm: a new reader should say nothing of transformers' models.
"""

from __future__ import annotations

import argparse
import ast
from collections import Counter
from pathlib import Path

from headwise.check.diagnosis.readers import READERS
from headwise.check.files.syntax import Source


def main() -> None:
    """Read all files, print each finding, then how many of which rule."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folders", type=Path, nargs="+")
    parser.add_argument("--rules", nargs="+", default=[*READERS], choices=[*READERS])
    options = parser.parse_args()
    found, read = Counter[str](), 0
    for path in sorted(one for folder in options.folders for one in folder.rglob("*.py")):
        try:
            source = Source(path.read_text(encoding="utf-8"), str(path))
        except (SyntaxError, ValueError):
            continue
        for part in source.tree.body:
            if not isinstance(part, ast.ClassDef | ast.FunctionDef):
                continue
            read += 1
            for rule in options.rules:
                for way, line, _ in (
                    said for one in READERS[rule] for said in one(part, source, {})
                ):
                    found[f"{rule}.{way}"] += 1
                    print(
                        f"{path}:{line} {rule}.{way}: {source.text.splitlines()[line - 1].strip()}"
                    )
    print(f"{read} classes and functions; " + ", ".join(f"{n} {k}" for k, n in found.most_common()))


if __name__ == "__main__":
    main()
