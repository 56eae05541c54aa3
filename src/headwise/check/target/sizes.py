"""The sizes that something is built with, and configurations that answer to any name of them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from .names import building_role

CONTEXT = 16
"""The longest sequence of a layer that asks for one: more than any probe needs but one."""


USUAL = {
    "dropout": 0.0,
    "bias": True,
    "batch_first": True,
    "layer": 0,
    "layers": 2,
    "vocabulary": 11,
}
USUAL |= {"eps": 1e-6, "flag": False, "once": 1, "base": 10000.0}
USUAL |= {
    "batch": 2,
    "most_sequences": 8,
    "device": None,
    "dtype": None,
    "scale": 1.0,
    "count": CONTEXT,
    "window": 4,
    "rank": 12,
    "sides": (4, 4),
}
"""What other roles get."""
WINDOWS = (USUAL["window"], (2, 5), (1, 2, 5))
"""What a window is tried with that must be given: its length, or its height and width, perhaps of
several frames."""


@dataclass
class BuildSizes:
    """The values that roles get. Those that nobody gave are chosen so that no two axes agree."""

    embed_dim: int | None = None
    num_heads: int | None = None
    num_kv_heads: int | None = None
    head_dim: int | None = None
    context_length: int | None = None
    causal: bool | None = None
    plain: bool = False  # whether configurations are taken as they are by themselves
    tried: int | None = None  # which value is tried where names tell nothing
    every: bool = False  # whether arguments that are None by default are given, too
    changes: dict[str, Any] = field(default_factory=dict)

    def settle(self, grouped: bool) -> BuildSizes:
        """The same with a width and a head count, where they were not given."""
        embed, heads, groups = self.embed_dim, self.num_heads, self.num_kv_heads
        share = 3 if groups == 2 else 2  # heads to a group: another number than that of groups
        if heads is None and embed is None:
            heads = 6 if grouped else 3
            heads = heads if groups is None else share * groups
            embed = 24 if 24 % heads == 0 and not grouped else 8 * heads
        elif heads is None:
            assert embed is not None
            wanted = (
                (3, 2, 4, 6, 5, 7, 8, 12, 1)
                if groups is None
                else (share * groups, 2 * groups, groups, 1)
            )
            wanted = (6, *wanted) if grouped and groups is None else wanted
            fits = [n for n in wanted if embed % n == 0]
            heads = next((n for n in fits if n * n != embed), fits[0] if fits else 1)
        elif embed is None:
            embed = (8 if heads != 8 else 5) * heads
        return replace(self, embed_dim=embed, num_heads=heads)

    def widths(self, parts: str) -> tuple[int, int]:
        """Inputs and outputs of a projection to q, k, v, or of heads back to the width (`o`)."""
        embed, dim = self.value("width"), self.value("head_dim")
        heads = sum(self.value("heads" if part in "qo" else "kv_heads") for part in parts)
        return (heads * dim, embed) if parts == "o" else (embed, heads * dim)

    def value(self, role: str) -> Any:
        """What an argument of this role gets; `Unknown` where nothing can be said."""
        embed, heads = self.embed_dim or 24, self.num_heads or 3
        groups = self.num_kv_heads or (heads // 2 if heads % 2 == 0 else heads)
        sizes = {
            **dict.fromkeys(("width", "out_width", "kv_width"), embed),
            "heads": heads,
            "kv_heads": groups,
            "repeats": heads // groups,
            "head_dim": self.head_dim or max(1, embed // heads),
            "rotary_width": max(2, (self.head_dim or embed // heads) // 4 * 2),
            "context": self.context_length or CONTEXT,
            "causal": bool(self.causal),
            "temperature": (self.head_dim or max(1, embed // heads)) ** 0.5,
        }
        return (USUAL | sizes | self.changes).get(role, Unknown)


def invented(sizes: BuildSizes, kind: str = "", use: str = "") -> Any:
    """What is tried for a name that tells nothing; `Unknown` where nothing is tried.

    Args:
        kind: its annotation, in words.
        use: the code that may use it: "called", called as a "norm", "tested" or nothing.
    """
    if sizes.tried is None:
        return Unknown
    numbers = (sizes.value("width"), sizes.value("head_dim"), 2, 1)
    options = numbers if "int" in kind else (numbers[0], False, *numbers[1:])
    if use == "norm":
        options = (torch.nn.LayerNorm,)
    elif use == "called":
        options = (torch.nn.ReLU, torch.nn.functional.relu)
    elif use == "tested" or "bool" in kind:
        options = (False, True)
    elif "float" in kind:
        options = (1.0, 0.5)
    return options[sizes.tried % len(options)]


class Unknown:
    """Stands for a value that nothing is known about."""


class Missing(AttributeError, KeyError):
    """A config was asked for a field that nothing is known about."""

    def __str__(self) -> str:
        return f"the config has no field {self.args[0]!r}"


class Config(dict[str, Any]):
    """A configuration that answers to whatever name a field goes under, as attribute or as key.

    >>> config = Config(BuildSizes(24, 3), {})
    >>> config.n_embd, config["num_heads"], getattr(config, "flash", False)
    (24, 3, False)
    """

    def __init__(
        self, sizes: BuildSizes, given: Mapping[str, Any], needed: Collection[str] = ()
    ) -> None:
        super().__init__(given)
        self._sizes, self._needed = sizes, needed  # names that it must answer to
        self._asked: dict[str, Any] = {}
        self._invented: dict[str, Any] = {}

    def _look(self, name: str) -> Any:
        if dict.__contains__(self, name):
            return dict.__getitem__(self, name)
        role = building_role(name, name in self._needed)
        value = self._sizes.changes.get(name, Unknown)
        if value is Unknown and role is not None:
            value = self._sizes.value(role)
        if value is Unknown and name in self._needed:
            value = self._invented[name] = invented(self._sizes)
        if value is Unknown:
            raise Missing(name)
        self._asked[name] = value
        return value

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return self._look(name)

    def __getitem__(self, name: str) -> Any:
        return self._look(name)

    def __contains__(self, name: object) -> bool:
        return dict.__contains__(self, name) or (
            isinstance(name, str) and building_role(name) is not None
        )

    def get(self, name: str, default: Any = None) -> Any:
        """The field, or the default where nothing is known about it."""
        try:
            return self._look(name)
        except Missing:
            return default


def shown(arguments: Mapping[str, Any]) -> str:
    """Arguments as they would be typed."""

    def value(given: Any) -> str:
        if isinstance(given, Config):
            return f"Config({shown({**given, **given._asked})})"
        text = repr(given)
        return text if len(text) <= 60 else f"{type(given).__name__}(…)"

    return ", ".join(f"{name}={value(given)}" for name, given in arguments.items())


def flat(arguments: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Arguments, and the fields of those that are configurations."""
    for name, value in arguments.items():
        if isinstance(value, Config) or building_role(name, needed=True) == "config":
            yield from fields_of(value).items()
        else:
            yield name, value


def asked(arguments: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Arguments, and the fields that a configuration was asked for."""
    for name, value in arguments.items():
        yield from value._asked.items() if isinstance(value, Config) else [(name, value)]


def fields_of(config: Any) -> Mapping[str, Any]:
    """The fields of a configuration, or the attributes of anything else."""
    if isinstance(config, Config):
        return {**config, **config._asked}
    fields = config if isinstance(config, Mapping) else getattr(config, "__dict__", {})
    return fields if isinstance(fields, Mapping) else {}
