"""Where packages' sources are that ship their tests in these alone."""

from pathlib import Path


def source(package: str) -> Path:
    """The folder into which `make` unpacked the sources of a package."""
    [folder] = (Path(__file__).parents[1] / ".venv-suites" / "sources").glob(f"{package}-*/")
    return folder
