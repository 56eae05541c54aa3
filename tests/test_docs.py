"""The site: every public name stands in docs/api with an example, and what checks that can fail."""

from __future__ import annotations

import json
import re
import shlex
import sys
from pathlib import Path

import pytest

import headwise as hw
from headwise.cli.main import main
from sessions import pattern, sessions

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "docs" / "site"))

from names import documented, faults, path_of, public  # noqa: E402


def test_every_public_name_is_documented_with_an_example() -> None:
    assert faults(public(), list(documented())) == []


def test_the_names_are_those_of_the_package() -> None:
    names = public()
    assert {f"headwise.{name}" for name in hw.__all__} <= set(names)
    assert path_of("headwise.attend", hw.attend) == "headwise.attend.attend"


def test_the_version_stands_in_one_place() -> None:
    assert f"version: {hw.__version__}\n" in (ROOT / "CITATION.cff").read_text("utf-8")
    assert hw.__version__ not in (ROOT / "pyproject.toml").read_text("utf-8")


def test_what_is_missing_is_named() -> None:
    class Bare:
        pass

    names = {"headwise.attend": hw.attend, "headwise.Bare": Bare, "headwise.new": hw.watch}
    entries = [("headwise.attend", ""), ("headwise.Bare", ""), ("headwise.gone", "")]
    assert faults(names, entries) == [
        "docs/api has `::: headwise.gone`, which is not public",
        "headwise.Bare has no docstring",
        "headwise.Bare has no example, neither in its docstring nor in docs/api",
        "headwise.new stands 0 times in docs/api; write `::: headwise.new` once",
    ]


def test_the_first_command_is_real(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    ((command, shown),) = sessions((ROOT / "docs" / "start.md").read_text("utf-8"))
    assert main(shlex.split(command)[2:]) == 0
    out = re.sub(r"(?<=: )/\S*/", "", capsys.readouterr().out)  # whole paths
    assert re.fullmatch(pattern(shown), out)
    assert (tmp_path / "headwise-look.html").is_file()


PAGES = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "src").rglob("*.md")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_column_of_a_table_is_named(page: Path) -> None:
    heads = re.findall(r"^(\|.*\|)\n\|[-:| ]+\|$", page.read_text("utf-8"), re.M)
    assert [head for head in heads if re.search(r"\|\s*\|", head)] == []


def test_notebooks_are_kept_without_outputs() -> None:
    files = list((ROOT / "examples").glob("*.ipynb"))
    assert files
    for file in files:
        cells = json.loads(file.read_text("utf-8"))["cells"]
        assert not any(cell.get("outputs") for cell in cells), file.name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_examples_are_inside_fences(page: Path) -> None:
    fenced = False
    for line in page.read_text("utf-8").splitlines():
        if line.startswith("```"):
            fenced = not fenced
        assert fenced or not line.startswith(">>>"), line
    assert not fenced
