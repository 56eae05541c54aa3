"""Constructing what is to be checked: arguments worked out from their names.

What cannot be worked out is asked for by name, once, with an example (ValueError).
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import importlib
import inspect
import linecache
import re
import sys
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .configs import config_classes, configured
from .introspect import SPEAKS_OF_ROPE, by_role, is_number
from .names import building_role, calling_role, parts_of
from .on_cpu import OnCPU
from .signatures import signature, source_of
from .sizes import (
    WINDOWS,
    BuildSizes,
    Config,
    Missing,
    Unknown,
    asked,
    flat,
    invented,
    shown,
)
from .uses import Use, as_config, documented, is_unread, use_of, use_of_field


def build(
    factory: Callable[..., Any], args: tuple[Any, ...], given: Mapping[str, Any], sizes: BuildSizes
) -> tuple[Any, dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Call a class or factory with arguments that are given or worked out.

    Returns:
        What it gives; the arguments under its own names; the same by role; and those that were
        made up.

    Raises:
        Unsaid: an argument that has to be asked for.
        Exception: whatever the constructor raises.
    """
    made = _Constructor(factory, args, given)
    sizes = made.learn(sizes)
    errors: list[Exception] = []
    while True:  # a file may speak of several configurations
        try:
            kwargs = made.work_out(sizes)
            with nullcontext() if torch.cuda.is_available() else OnCPU():
                thing = _built(factory, args, kwargs)
            break
        except Exception as error:
            if isinstance(error, Missing):
                name = made.field_of(error.args[0])
                if name not in sizes.changes and (learnt := made.field(name, sizes)) is not None:
                    sizes = learnt
                    continue
                known = sizes.tried is not None or building_role(name, needed=True) is not None
                within = re.search(rf"\.{name}(\.\w|\[)|\[.{name}.\]\[", source_of(factory))
                if (known or within is not None) and name not in {*made.needed, *made.nested}:
                    (made.needed if within is None else made.nested).add(name)
                    continue
                if not errors:
                    raise made.question([name], "config field") from None
            errors.append(error)
            made.place += 1
            if made.place >= made.choices:
                raise min(errors, key=_how_vague) from None
    named = made.placed | kwargs
    roles = by_role(made.under_roles(flat(named)), made.names)
    for name, value in made.under_roles(asked(named)):
        role = building_role(name, True, made.names) or ""
        if isinstance(value, bool) and role in SIZES:
            continue  # `norm_context=True` is no length
        if role == "window" or not isinstance(value, list | tuple | dict):
            roles.setdefault(role, value)
    for config in (value for value in named.values() if isinstance(value, Config)):
        made.invented |= config._invented
    return thing, named, roles, made.invented


def _built(factory: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    try:
        return factory(*args, **kwargs)
    except SystemExit as leaves:  # some do so where others raise
        raise RuntimeError(f"it leaves Python: {leaves}") from leaves


def _how_vague(error: Exception) -> int:
    """How little an error says of what is wrong: a package that is not there says most, and a field
    that another configuration may have least."""
    return 0 if isinstance(error, ImportError) else 2 if isinstance(error, AttributeError) else 1


class Unsaid(ValueError):
    """An argument that has to be asked for."""


SET_ALWAYS = {"width", "heads", "context", "dropout", "batch_first", "out_width", "kv_width"}
"""Roles whose defaults give way: sizes of our own show more, and no chance hides a mistake."""


SIZES = {"width", "heads", "kv_heads", "head_dim", "context", "out_width", "kv_width"}
"""Roles of numbers, which no flag is."""
GUESSED = ("once", "temperature", "head_dim", "sides", "count")
"""Roles whose values are guesses where a name is only like a usual one."""
SHARED = ("head_dim", "count", "layers")
"""Roles of numbers that the width is divided by under other names."""
GUESSES = (str, int, enum.Enum, nn.Embedding, nn.Identity)
"""What is chosen for an argument and may not be meant."""
PLAIN = {"int": 1, "float": 1.0, "bool": False, "str": ""}
"""What fields get that nothing here reads, by their annotations."""
ROWS = 512
"""Of an embedding that is handed in: more positions than any probe speaks of."""


@dataclass
class _Constructor:
    """A class or factory, and what of its call is given."""

    factory: Callable[..., Any]
    args: tuple[Any, ...]
    given: Mapping[str, Any]

    def __post_init__(self) -> None:
        self.parameters = signature(self.factory)
        self.names = [parameter.name for parameter in self.parameters]
        self.placed = dict(zip(self.names, self.args, strict=False))
        self.place, self.choices = 0, 1  # which class of configurations is taken
        self.needed: set[str] = set()  # fields that one must have
        self.nested: set[str] = set()  # fields that are configurations themselves
        self.invented: dict[str, Any] = {}
        self.used: dict[str, str] = {}  # roles that the code tells, where names tell none

    def under_roles(self, pairs: Iterable[tuple[str, Any]]) -> Iterable[tuple[str, Any]]:
        """Arguments by name, and by the role's name where the code tells it; modules have none."""
        plain = (pair for pair in pairs if not isinstance(pair[1], nn.Module))
        return [(self.used.get(name, name), value) for name, value in plain]

    def _use(self, name: str, role: str | None) -> Use | None:
        """What the code takes an argument for, where its name tells nothing or may mislead."""
        told, short = documented(self.factory, name), None
        if len(name) == 1:  # which names several things
            used = use_of(self.factory, name)
            short = told or (used if used and used.sure else None)
            short = short if short and short.role != role else None
        if role not in (None, *SHARED) and not short:
            return None
        use = short or use_of(self.factory, name) or told or as_config(self.factory, name)
        counts = role in ("count", "layers")
        shared = use is not None and (use.divided or (counts and use.role == "heads"))
        if use is None or (role in SHARED and not shared):
            return None
        self.used[name] = use.role
        return use

    def learn(self, sizes: BuildSizes) -> BuildSizes:
        """The sizes, with those that stand among the arguments under other names."""
        given = [pair for pair in flat({**self.placed, **self.given}) if is_number(pair[1])]
        for name in {name for name, _ in given} & {*self.names}:
            self._use(name, building_role(name, True, self.names))
        numbers = by_role(self.under_roles(given), self.names)
        pairs = {"embed_dim": "width", "num_heads": "heads", "num_kv_heads": "kv_heads"}
        pairs |= {"head_dim": "head_dim", "context_length": "context"}
        unknown = [name for name in pairs if getattr(sizes, name) is None]
        known = {name: numbers.get(pairs[name]) for name in unknown}
        code = getattr(getattr(self.factory, "__init__", None), "__code__", None)
        read = [name for name in getattr(code, "co_names", ()) if len(name) > 1]
        grouped = any(building_role(name) == "kv_heads" for name in (*self.names, *read))
        return dataclasses.replace(sizes, **known).settle(grouped)

    def field_of(self, name: str) -> str:
        """The field that is read where it is asked for a method of text, `config.kind.lower()`."""
        read = re.search(rf"\.(\w+)\.{name}\(", source_of(self.factory))
        return read[1] if read and hasattr(str, name) else name

    def field(self, name: str, sizes: BuildSizes) -> BuildSizes | None:
        """The sizes with a field of a configuration, where the code tells what it is for."""
        if (use := use_of_field(self.factory, name)) is None:
            return None
        value = sizes.value(use.role) if use.role else use.value
        if value is Unknown:
            return None
        if not use.sure:
            self.invented[name] = value
        return dataclasses.replace(sizes, changes=sizes.changes | {name: value})

    def work_out(self, sizes: BuildSizes) -> dict[str, Any]:
        """The arguments by name: those that are given, and those that their names tell."""
        kwargs, rest, unknown, free = {}, dict(self.given), [], False
        # a module that is there by default has a width of its own
        movable = not any(isinstance(one.default, nn.Module) for one in self.parameters)
        for parameter in self.parameters[len(self.args) :]:
            name, role = parameter.name, building_role(parameter.name)
            if parameter.kind is parameter.VAR_KEYWORD:
                free = True
            if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                continue
            required = parameter.default is parameter.empty
            use = self._use(name, building_role(name, True, self.names)) if required else None
            worded = sizes.tried is not None and isinstance(parameter.default, str)
            untold = worded or (required and role is None)
            choice = self._choice(parameter, sizes) if untold else None
            wanted = required or (sizes.every and parameter.default is None)
            role = use.role if use else building_role(name, wanted, self.names)
            if use and not use.sure and sizes.tried is not None:
                role = None  # other values are tried
            if role == "dropout" and parameter.annotation in (int, "int"):
                role = None  # `reduction_rate: int`
            likely = role is not None and building_role(name, beside=self.names) is None
            likely = not use.sure if use else likely and role in GUESSED
            if name in rest:
                kwargs[name] = rest.pop(name)
            elif role == "config" and (required or self._config_class(name)):
                fields = {one: rest[one] for one in rest if required and one not in self.names}
                kwargs[name] = self._config(name, sizes, fields)
                rest = {one: value for one, value in rest.items() if one not in fields}
            elif role == "config":
                continue
            elif choice is not None:
                kwargs[name] = choice
                if isinstance(choice, GUESSES) and choice is not False:
                    self.invented[name] = choice
            elif use and use.value is not Unknown:
                kwargs[name] = use.value
            elif role is not None and (
                required or (movable and _gives_way(role, parameter, sizes))
            ):
                value = sizes.value(role)
                if role == "window":
                    self.choices = max(self.choices, len(WINDOWS))
                    value = WINDOWS[self.place % len(WINDOWS)]
                if role == "device" and parameter.annotation in (str, "str"):
                    value = "cpu"
                if value is not Unknown:
                    kwargs[name] = value
                    if likely:
                        self.invented[name] = value
            elif required and is_unread(self.factory, name):
                kwargs[name] = None
            elif (value := self._invented(parameter, sizes)) is not Unknown:
                kwargs[name] = self.invented[name] = value
            elif required:
                unknown.append(name)
        if unknown:
            raise self.question(unknown, "argument")
        if rest and not free:
            known = ", ".join(self.names) or "none"
            raise ValueError(
                f"check({name_of(self.factory)}, {shown(rest)}): the constructor has no argument "
                f"{', '.join(rest)}; it has {known}"
            )
        return kwargs | rest

    def _invented(self, parameter: inspect.Parameter, sizes: BuildSizes) -> Any:
        """What is tried for an argument that must be given, or that is called though it is None."""
        code, name = source_of(self.factory), parameter.name
        called = re.search(rf"(?<![.\w]){name}\(", code) is not None
        if parameter.default is not parameter.empty and not (called and parameter.default is None):
            return Unknown
        tested = re.search(rf"\b(if|not|and|or|assert) ([\w.]+\.)?{name}\b(?! [<>=])", code)
        use = "called" if called else "tested" if tested else ""
        use = "norm" if called and "norm" in name else use
        return invented(sizes, str(parameter.annotation), use)

    def _choice(self, parameter: inspect.Parameter, sizes: BuildSizes) -> Any:
        """A module that is handed in, a member of an enumeration, a word, or no for a flag."""
        word = parameter.annotation in (str, "str")
        module = None if word else self._module(parameter, sizes)
        other = _first_choice(self.factory, parameter, sizes.tried or 0)
        return other if module is None else module

    def _module(self, parameter: inspect.Parameter, sizes: BuildSizes) -> nn.Module | None:
        """A module that is handed in: of the file's class of that name, a projection, a norm, an
        embedding, or the attention inside, where its file has one that can be built without a
        word."""
        family = inspect.getmro(self.factory) if inspect.isclass(self.factory) else [self.factory]
        name = parameter.name
        code = "".join(
            source_of(kind) for kind in family if kind.__module__.split(".")[0] != "torch"
        )
        kept = re.search(rf"self\.(\w+)(: [^=\n]+)? = {name} *(#.*)?\n", code)
        handed = "Module" in str(parameter.annotation) or (kept and f"self.{kept[1]}(" in code)
        inner = re.search("att(n|ention)" + "$" * (not handed), name)
        sized = not handed and building_role(name, needed=True) is not None
        if sized or not (handed or inner) or re.search(rf"(?<![.\w]){name}\(", code):
            return None  # a class is wanted where it is called
        home = vars(sys.modules.get(self.factory.__module__, typing))
        kinds = [
            kind
            for kind in list(home.values())
            if inspect.isclass(kind) and issubclass(kind, nn.Module) and kind is not self.factory
        ]
        if SPEAKS_OF_ROPE.search(name):  # which turns each head by itself
            sizes = replace(sizes, embed_dim=sizes.value("head_dim"), num_heads=1)
        for kind in (kind for kind in kinds if kind.__name__.lower() == _folded(name)):
            return kind(**_Constructor(kind, (), {}).work_out(sizes))
        if parts_of(name):
            return nn.Linear(*sizes.widths(parts_of(name)))
        if "norm" in name:
            return nn.LayerNorm(sizes.value("width"))
        if "emb" in name:
            return nn.Embedding(ROWS, sizes.value("width"))
        for kind in sorted(kinds, key=_of_qkv, reverse=True) if inner else ():
            free = all(p.default is not p.empty or p.kind > 1 for p in signature(kind))
            if (
                free
                and kind.__module__ == self.factory.__module__
                and (_of_qkv(kind) or "Attention" in kind.__name__)
            ):
                return kind()
        for kind in _beside(self.factory) if inner else ():
            with contextlib.suppress(Exception):  # somebody's class, built on a guess
                return kind(**_Constructor(kind, (), {}).work_out(sizes))
        return nn.Identity() if kept and handed and not inner else None  # what changes nothing

    def _config_class(self, name: str) -> type | None:
        """The class of a configuration: as annotated, else one that its file speaks of."""
        said, own = config_classes(self.factory, name)
        count = len(own) + (not said)  # the last is one that answers to all
        self.choices, place = max(self.choices, count), self.place % max(1, count)
        return own[place] if place < len(own) else None

    def _config(self, name: str, sizes: BuildSizes, given: Mapping[str, Any]) -> Any:
        """The configuration: of its own class if there is one, else one that answers to all."""
        kind = self._config_class(name)
        if kind is None:
            nested = {one: Config(sizes, {}, self.needed) for one in self.nested}
            return Config(sizes, {**nested, **given}, self.needed)
        made = _Constructor(kind, (), {**self._of_others(kind), **given})
        if made.names and all(building_role(one) == "config" for one in made.names):
            return Config(sizes, dict(given), self.needed)  # its class only holds what it is handed
        given = {**given, **{n: v for n, v in sizes.changes.items() if n in made.names}}
        kwargs = given if sizes.plain else made.work_out(sizes)
        self.invented |= made.invented
        fields = {name: value for name, value in kwargs.items() if name in made.names}
        config = configured(kind, fields, source_of(self.factory))
        if getattr(config, "_attn_implementation", "") is None:  # transformers' models set it
            config._attn_implementation = "eager"
        return config

    def _of_others(self, kind: type) -> dict[str, Any]:
        """Fields of a configuration that must be given and that the file never mentions: they are
        for other parts of a model."""
        home = sys.modules.get(self.factory.__module__)
        code = "".join(linecache.getlines(getattr(home, "__file__", None) or ""))
        needed = (one for one in signature(kind) if one.default is one.empty)
        words = {one.name: getattr(one.annotation, "__name__", one.annotation) for one in needed}
        return {
            name: PLAIN[word]
            for name, word in words.items()
            if code and word in PLAIN and building_role(name) is None
            if not re.search(rf"\.{name}\b|[\"']{name}[\"']", code)
        }

    def question(self, unknown: list[str], what: str) -> Unsaid:
        """What has to be asked for."""
        plural = "s" if len(unknown) > 1 else ""
        return Unsaid(
            f"check({name_of(self.factory)}): what is to be given for the {what}{plural} "
            f"{', '.join(unknown)} cannot be worked out from the name{plural}; give it: "
            f"{as_typed(self.factory, unknown)}"
        )


def as_typed(factory: Callable[..., Any], names: Iterable[str]) -> str:
    """Arguments as they would be typed, in Python and on the command line."""
    named = [*names]
    call, options = ", ".join(f"{n}=…" for n in named), " ".join(f"--{n} …" for n in named)
    return f"hw.check({name_of(factory)}, {call}), or on the command line {options}"


def _beside(factory: Callable[..., Any]) -> Iterator[type[nn.Module]]:
    """Attention of queries, keys and values that another file of the same folder holds."""
    home = sys.modules.get(factory.__module__)
    file, package = getattr(home, "__file__", None), factory.__module__.rpartition(".")[0]
    for path in sorted(Path(file).parent.glob("*att*.py")) if file else ():
        name = f"{package}.{path.stem}" if package else path.stem
        with contextlib.suppress(Exception):  # it may run anything
            known = vars(importlib.import_module(name)) if path.name != Path(str(file)).name else {}
            own = [one for one in known.values() if getattr(one, "__module__", "") == name]
            kinds = [one for one in own if inspect.isclass(one) and issubclass(one, nn.Module)]
            yield from filter(_of_qkv, kinds)


def _gives_way(role: str, parameter: inspect.Parameter, sizes: BuildSizes) -> bool:
    default = parameter.default
    if re.match(r"(typing\.)?([Ll]ist|[Tt]uple)\b", str(parameter.annotation)):
        return False  # one for each stage
    if role in sizes.changes or (sizes.every and default is None):
        return True
    if role == "causal":
        return sizes.causal is not None and isinstance(default, bool)
    if role == "kv_heads":
        return True
    if role == "layer":
        return default is None
    if role == "head_dim":
        return sizes.head_dim is not None or isinstance(default, int)
    if role in ("out_width", "rotary_width"):
        return isinstance(default, int)
    settled = default is None or isinstance(default, bool | list | tuple | dict)
    return role in SET_ALWAYS and not settled


def _first_choice(factory: Callable[..., Any], parameter: inspect.Parameter, tried: int) -> Any:
    """A member of an enumeration, False for a flag, or a word that the code compares an argument
    with: the first one, or another that is `tried`; None where nothing tells.
    """
    if parameter.annotation in (bool, "bool"):
        return False
    home = vars(sys.modules.get(factory.__module__, typing))
    named = [one for name, one in home.items() if name.lower() == _folded(parameter.name)]
    members = [one for one in (parameter.annotation, *named) if isinstance(one, enum.EnumMeta)]
    options = list(members[0]) if members else words_of(factory, parameter.name)
    return options[tried % len(options)] if options else None


def _folded(name: str) -> str:
    return name.replace("_", "").lower()


def words_of(factory: Callable[..., Any], name: str) -> list[str] | list[int]:
    """The words, or the numbers, that the code compares an argument with.

    >>> class Layer:
    ...     def __init__(self, kind="plain"): ...
    >>> words_of(Layer, "kind")
    []
    """
    code, folded = source_of(factory), r"(?:\.(?:lower|upper)\(\))?"
    kept = re.findall(rf"(self\.\w+|\w+) = {name}{folded}[ \t]*(?:#|$)", code, re.MULTILINE)
    spoken = rf"(?<!\w)(?:{'|'.join(map(re.escape, [name, *kept]))}){folded}"
    pattern = rf"{spoken} ?(?:[=!]=|(?:not )?in) ?[(\[{{]?[\"'](\w+)[\"']"
    words = re.findall(pattern, code)
    words += re.findall(rf"[\"'](\w+)[\"'] in {spoken}(?![\w.])", code)
    for cases in re.findall(rf"match {spoken} *:((?:\s*\n.*)+)", code):
        words += re.findall(r"^\s*case [\"'](\w+)[\"']", cases, re.MULTILINE)
    numbers = re.findall(rf"\b(?:if|and|or|not|assert) {spoken} ?== ?(\d+)\b", code)
    if not words and numbers:
        return [int(one) for one in dict.fromkeys(numbers)]
    if not words and dataclasses.is_dataclass(factory):  # whose words others compare
        words = re.findall(pattern, source_of(sys.modules.get(factory.__module__)))
    return [*dict.fromkeys(words)]


def _of_qkv(kind: type[nn.Module]) -> bool:
    """Whether a module is called with queries, keys and values."""
    first = [calling_role(parameter.name) for parameter in signature(kind.forward)[:3]]
    return first == ["query", "key", "value"]


def name_of(thing: Any) -> str:
    """What it is called, or what its class is."""
    return getattr(thing, "__name__", None) or type(thing).__name__
