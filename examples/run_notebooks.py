"""Runs the notebooks here, each in a fresh kernel: `make notebooks`.

    python examples/run_notebooks.py [NAME.ipynb …]

They are kept without outputs; what a run shows is written to build/notebooks.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
OUT = HERE.parent / "build" / "notebooks"
PICTURES = {"text/html", "image/png", "image/svg+xml", "application/vnd.plotly.v1+json"}


def main(names: list[str]) -> int:
    """Run them; 1 where a cell fails, one is kept with outputs, or none shows a picture."""
    import nbformat  # pyright: ignore[reportMissingImports]
    from nbclient import NotebookClient  # pyright: ignore[reportMissingImports]
    from nbclient.exceptions import CellExecutionError  # pyright: ignore[reportMissingImports]

    OUT.mkdir(parents=True, exist_ok=True)
    wrong = 0
    files = [Path(name) for name in names] or sorted(HERE.glob("*.ipynb"))
    if not files:
        print(f"{HERE}: there is no notebook to run", file=sys.stderr)
        wrong += 1
    for file in files:
        notebook: Any = nbformat.read(file, as_version=4)
        nbformat.validate(notebook)
        if any(cell.get("outputs") for cell in notebook.cells):
            print(f"{file.name}: kept with outputs; clear them", file=sys.stderr)
            wrong += 1
        start = time.perf_counter()
        try:
            NotebookClient(
                notebook, timeout=300, resources={"metadata": {"path": str(HERE)}}
            ).execute()
        except CellExecutionError as error:
            print(f"{file.name}: {error}", file=sys.stderr)
            wrong += 1
            continue
        shown = {kind for cell in notebook.cells for kind in _kinds(cell)}
        if not shown & PICTURES:
            print(f"{file.name}: no cell shows a picture", file=sys.stderr)
            wrong += 1
        nbformat.write(notebook, OUT / file.name)
        print(f"{file.name}: {time.perf_counter() - start:.0f} s")
    print(f"notebooks in {OUT.relative_to(HERE.parent)}")
    return int(wrong > 0)


def _kinds(cell: Any) -> list[str]:
    return [kind for one in cell.get("outputs", ()) for kind in one.get("data", {})]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
