"""Right implementations as people write them, and one mistake at a time in their text.

A mutant is a right file of this folder with one piece of its text replaced (`also`: others that
the same mistake touches). `rule` is the rule that the first finding must name, and `says` a pattern
that its message must fit.
"""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Style:
    """One right file: what it is called, its class, and the sizes to build it with."""

    file: str
    name: str
    arguments: dict[str, Any] = field(default_factory=dict)

    def source(self) -> str:
        return (HERE / f"{self.file}.py").read_text()


STYLES = {
    style.file: style
    for style in (
        Style("per_head", "MultiHeadAttention", {"n_embd": 24, "n_head": 3, "block_size": 16}),
        Style(
            "split",
            "MultiHeadAttention",
            {"d_in": 24, "d_out": 24, "context_length": 16, "num_heads": 3},
        ),
        Style("fused", "CausalSelfAttention"),
        Style("conv1d", "GPT2Attention", {"n_embd": 24, "n_head": 3, "n_positions": 16}),
        Style("grouped", "GroupedQueryAttention", {"dim": 24, "num_heads": 6, "num_kv_heads": 2}),
        Style("encoder", "Attention", {"dim": 24, "num_heads": 3}),
        Style("matrices", "Attention", {"d_model": 24, "n_heads": 3, "n_ctx": 16}),
    )
}


@dataclass(frozen=True)
class Mutant:
    """One mistake: in which style, what it is in words, what is replaced by what, and its name."""

    style: str
    what: str
    old: str
    new: str
    rule: str = ""
    says: str = ""
    severity: str = "error"
    sizes: dict[str, Any] = field(default_factory=dict)
    also: tuple[tuple[str, str], ...] = ()

    @property
    def id(self) -> str:
        return f"{self.style}: {self.what}"

    @property
    def arguments(self) -> dict[str, Any]:
        """The style's sizes, and the mutant's own."""
        return STYLES[self.style].arguments | self.sizes

    def source(self) -> str:
        """The right text with the one mistake in it."""
        text = STYLES[self.style].source()
        for old, new in ((self.old, self.new), *self.also):
            assert text.count(old) == 1, f"{self.id}: {old!r} is there {text.count(old)} times"
            text = text.replace(old, new)
        return text


def load(source: str, name: str, folder: Path) -> Any:
    """A class from a text, as if from a file of its own, so that hints can quote its lines."""
    path = folder / f"{name.lower()}_{abs(hash(source)):x}.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module: ModuleType = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # where `inspect` looks for a class's file
    spec.loader.exec_module(module)
    return getattr(module, name)
