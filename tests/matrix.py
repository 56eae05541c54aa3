"""The core tests on other versions, each in an environment of its own: `make test-matrix`.

    python tests/matrix.py                                        # every row, the table last
    python tests/matrix.py --rows 3.11,2.10.0,4.57.6 3.13,,none   # only these

A row is a Python, a PyTorch and a transformers; nothing stands for the newest of the index, and
`none` for no transformers. By itself it takes every Python that this machine has with the newest of
both, and the running one with the oldest PyTorch that is declared, with transformers 4.57 and with
none. A plain `pip install` of PyTorch brings CUDA's libraries on Linux, 7 GB a row, so a row's
environment goes when it is done; what pytest said stays in build/matrix.
"""

from __future__ import annotations

import argparse
import glob
import os
import re
import resource
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
OUT = ROOT / "build" / "matrix"
OLDEST_TRANSFORMERS = "4.57.6"
TOOLS = ["pytest", "pytest-xdist", "hypothesis", "beartype", "pandas"]

CORE = """
    test_house.py::test_the_package_needs_nothing_optional
    test_house.py::test_importing_headwise_imports_nothing_heavy
    test_house.py::test_attend_and_the_layer_compile_whole
    backends/test_attend.py core/test_masks.py kernels/test_native.py stats/test_statistics.py
    layers/test_layer.py layers/test_cache.py capture/test_watch.py capture/test_private_torch.py
""".split()
"""Calls and gradients, masks, the kernel, statistics, the layer, what PyTorch does not promise."""
WITH_TRANSFORMERS = """
    weights/test_layouts.py capture/test_watch_transformers.py
    capture/test_attn_implementation.py capture/test_ablate.py
""".split()


@dataclass(frozen=True)
class Row:
    """One combination; versions are as pip takes them, `""` for the newest."""

    python: str
    torch: str
    transformers: str

    @classmethod
    def of(cls, text: str) -> Row:
        """From `python,torch,transformers`."""
        parts = text.split(",")
        if len(parts) != 3 or not parts[0]:
            raise SystemExit(f"--rows {text}: write PYTHON,TORCH,TRANSFORMERS, like 3.12,2.13.0,")
        return cls(*parts)

    @property
    def name(self) -> str:
        """For the file of its log."""
        return "-".join(part or "newest" for part in (self.python, self.torch, self.transformers))


def pythons() -> dict[str, str]:
    """Every Python from 3.11 that starts here and can make an environment, by its version."""
    homes = os.environ.get("PYENV_ROOT", str(Path.home() / ".pyenv"))
    names = [f"python3.{minor}" for minor in range(11, 30)]
    candidates = [sys.executable, *glob.glob(f"{homes}/versions/3.*/bin/python3")]
    candidates += [path for name in names if (path := shutil.which(name))]
    asked = "import sys, ensurepip, venv; print('%d.%d' % sys.version_info[:2])"
    found: dict[str, str] = {}
    for path in candidates:
        done = subprocess.run([path, "-c", asked], capture_output=True, text=True, check=False)
        version = done.stdout.strip()
        if done.returncode == 0 and int(version.split(".")[1]) >= 11:
            found.setdefault(version, path)
    return dict(sorted(found.items(), key=lambda one: int(one[0].split(".")[1])))


def requirements() -> list[str]:
    """What headwise needs, as `pyproject.toml` declares it."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["dependencies"]


def default_rows(here: Iterable[str]) -> list[Row]:
    """What is tried by itself."""
    declared = next(one for one in requirements() if one.startswith("torch"))
    oldest = declared.partition(">=")[2] + ".0"
    running = "{}.{}".format(*sys.version_info)
    return [
        Row(running, oldest, OLDEST_TRANSFORMERS),
        Row(running, oldest, ""),
        Row(running, "", OLDEST_TRANSFORMERS),
        Row(running, "", "none"),
        *(Row(python, "", "") for python in here),
    ]


def installed(row: Row, path: str, environment: Path) -> dict[str, str]:
    """Make the environment, and say which versions it has."""

    def pip(*arguments: str) -> None:
        command = [str(environment / "bin/python"), "-m", "pip", "install", "--quiet"]
        settings = {**os.environ, "SKBUILD_WHEEL_CMAKE": "false"}
        subprocess.run([*command, "--no-cache-dir", *arguments], check=True, env=settings)

    def pinned(name: str, version: str) -> str:
        return f"{name}=={version}" if version else name

    shutil.rmtree(environment, ignore_errors=True)
    subprocess.run([path, "-m", "venv", str(environment)], check=True)
    others = [one for one in requirements() if not one.startswith("torch")]
    if row.transformers != "none":
        others.append(pinned("transformers", row.transformers))
    pip(pinned("torch", row.torch), *others, *TOOLS)
    pip("--no-deps", "--editable", str(ROOT))
    listed = "from importlib.metadata import distributions as d\n"
    listed += "for one in d(): print(one.name.lower(), one.version)"
    asked = [str(environment / "bin/python"), "-c", listed]
    lines = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.splitlines()
    return dict(line.rsplit(" ", 1) for line in lines)


def tried(row: Row, path: str) -> list[str]:
    """A line of the table."""
    environment, log = OUT / "environment", OUT / f"{row.name}.log"
    try:
        versions = installed(row, path, environment)
        tests = CORE + (WITH_TRANSFORMERS if row.transformers != "none" else [])
        pytest = [str(environment / "bin/python"), "-m", "pytest", "-n", "1", "--tb=short"]
        chosen = [f"tests/{test}" for test in tests]
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        with log.open("w") as file:
            done = subprocess.run([*pytest, *chosen], cwd=ROOT, stdout=file, stderr=file)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
    except subprocess.CalledProcessError as error:
        return [row.python, row.torch, row.transformers, f"not installed: {error}", ""]
    finally:
        shutil.rmtree(environment, ignore_errors=True)
    said = log.read_text("utf-8").strip().splitlines() or ["nothing"]
    result = re.sub(r" in [\d.]+s.*", "", said[-1].strip("= "))
    seconds = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    has = [versions["torch"], versions.get("transformers", "none")]
    result = result if done.returncode == 0 else f"**{result}**"
    return [row.python, *has, result, f"{seconds:.0f}"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Try the rows and print the table; 1 where one of them does not pass."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rows", nargs="+", type=Row.of, help="PYTHON,TORCH,TRANSFORMERS …")
    chosen = parser.parse_args(arguments).rows
    OUT.mkdir(parents=True, exist_ok=True)
    here = pythons()
    lines = [["Python", "PyTorch", "transformers", "tests", "CPU seconds"], ["---"] * 5]
    for row in chosen or default_rows(here):
        if row.python not in here:
            raise SystemExit(f"there is no Python {row.python} here, only {', '.join(here)}")
        print(f"{row.name} …", flush=True)
        lines.append(tried(row, here[row.python]))
        print("  ", *lines[-1], flush=True)
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    (OUT / "table.md").write_text(table + "\n", "utf-8")
    print(table)
    return int(any("passed" not in line[3] or "**" in line[3] for line in lines[2:]))


if __name__ == "__main__":
    sys.exit(main())
