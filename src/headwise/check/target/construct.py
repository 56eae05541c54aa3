"""Constructing what is to be checked: arguments worked out from their names.

What cannot be worked out is asked for by name, once, with an example (ValueError).
"""

from __future__ import annotations

import dataclasses
import enum
import inspect
import re
import sys
import typing
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from .names import building_role, parts_of

CONTEXT = 16
"""The longest sequence of a layer that asks for one: more than any probe needs but one."""


USUAL = {"dropout": 0.0, "bias": True, "batch_first": True, "layer": 0, "vocabulary": 11}
USUAL |= {"eps": 1e-6, "flag": False, "once": 1}
USUAL |= {"device": None, "dtype": None, "scale": 1.0, "count": CONTEXT, "window": 4}
"""What other roles get."""
WINDOWS = (USUAL["window"], (2, 5))
"""What a window is tried with that must be given: its length, or its height and width."""


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
    changes: dict[str, Any] = field(default_factory=dict)

    def settle(self, grouped: bool) -> BuildSizes:
        """The same with a width and a head count, where they were not given."""
        embed, heads, groups = self.embed_dim, self.num_heads, self.num_kv_heads
        if heads is None and embed is None:
            heads = 6 if grouped else 3
            heads = heads if groups is None else 2 * groups
            embed = 24 if 24 % heads == 0 and not grouped else 8 * heads
        elif heads is None:
            assert embed is not None
            wanted = (3, 2, 4, 6, 5, 7, 8, 12, 1) if groups is None else (2 * groups, groups, 1)
            wanted = (6, *wanted) if grouped and groups is None else wanted
            fits = [n for n in wanted if embed % n == 0]
            heads = next((n for n in fits if n * n != embed), fits[0] if fits else 1)
        elif embed is None:
            embed = (8 if heads != 8 else 5) * heads
        return dataclasses.replace(self, embed_dim=embed, num_heads=heads)

    def widths(self, parts: str) -> tuple[int, int]:
        """Inputs and outputs of a projection to q, k, v, or of heads back to the width (`o`)."""
        embed, dim = self.value("width"), self.value("head_dim")
        heads = sum(self.value("heads" if part in "qo" else "kv_heads") for part in parts)
        return (heads * dim, embed) if parts == "o" else (embed, heads * dim)

    def value(self, role: str) -> Any:
        """What an argument of this role gets; `Unknown` where nothing can be said."""
        embed, heads = self.embed_dim or 24, self.num_heads or 3
        sizes = {
            **dict.fromkeys(("width", "out_width", "kv_width"), embed),
            "heads": heads,
            "kv_heads": self.num_kv_heads or (heads // 2 if heads % 2 == 0 else heads),
            "head_dim": self.head_dim or max(1, embed // heads),
            "rotary_width": max(2, (self.head_dim or embed // heads) // 4 * 2),
            "context": self.context_length or CONTEXT,
            "causal": bool(self.causal),
        }
        return (USUAL | sizes | self.changes).get(role, Unknown)


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

    def _look(self, name: str) -> Any:
        if dict.__contains__(self, name):
            return dict.__getitem__(self, name)
        role = building_role(name, name in self._needed)
        value = Unknown if role is None else self._sizes.value(role)
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


def build(
    factory: Callable[..., Any], args: tuple[Any, ...], given: Mapping[str, Any], sizes: BuildSizes
) -> tuple[Any, dict[str, Any], dict[str, Any]]:
    """Call a class or factory with arguments that are given or worked out.

    Returns:
        What it gives; the arguments under its own names; and the same by role.

    Raises:
        ValueError: an argument that has to be asked for.
        Exception: whatever the constructor raises.
    """
    made = _Constructor(factory, args, given)
    sizes = made.learn(sizes)
    errors: list[Exception] = []
    while True:  # a file may speak of several configurations
        kwargs = made.work_out(sizes)
        try:
            with nullcontext() if torch.cuda.is_available() else _OnCPU():
                thing = factory(*args, **kwargs)
            break
        except Missing as missing:
            name = missing.args[0]
            if name in made.needed or building_role(name, needed=True) is None:
                raise made.question([name], "config field") from None
            made.needed.add(name)
        except Exception as error:
            errors.append(error)
            made.place += 1
            if made.place >= made.choices:
                raise errors[0] from None
    named = made.placed | kwargs
    roles = _by_role(_flat(named))
    for name, value in _asked(named):
        roles.setdefault(building_role(name, needed=True) or "", value)
    return thing, named, roles


class _OnCPU(TorchFunctionMode):
    """Leaves on the CPU what a constructor moves to a GPU that is not there."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.cuda:
            return args[0]
        if str(kwargs.get("device")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)


def signature(factory: Callable[..., Any]) -> list[inspect.Parameter]:
    """The parameters of a class or function; none where Python does not tell. What a class hands
    on with `**kwargs` is what its base class takes."""
    try:
        own = inspect.signature(factory).parameters
    except (TypeError, ValueError):
        return []
    open_ = any(p.kind is p.VAR_KEYWORD for p in own.values())
    base = (
        next((kind for kind in inspect.getmro(factory)[1:] if "__init__" in vars(kind)), object)
        if open_ and inspect.isclass(factory)
        else object
    )
    if base in (nn.Module, object):
        return list(own.values())
    more = [
        p.replace(kind=p.KEYWORD_ONLY)
        for p in signature(base)
        if p.name not in own and p.kind in (1, 3)
    ]
    rest = [p for p in own.values() if p.kind is p.VAR_KEYWORD]
    return [*(p for p in own.values() if p not in rest), *more, *rest]


def _flat(arguments: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Arguments, and the fields of those that are configurations."""
    for name, value in arguments.items():
        if isinstance(value, Config) or building_role(name) == "config":
            yield from _fields(value).items()
        else:
            yield name, value


def _asked(arguments: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Arguments, and the fields that a configuration was asked for."""
    for name, value in arguments.items():
        yield from value._asked.items() if isinstance(value, Config) else [(name, value)]


def _fields(config: Any) -> Mapping[str, Any]:
    """The fields of a configuration, or the attributes of anything else."""
    if isinstance(config, Config):
        return {**config, **config._asked}
    fields = config if isinstance(config, Mapping) else getattr(config, "__dict__", {})
    return fields if isinstance(fields, Mapping) else {}


def _by_role(pairs: Iterable[tuple[Any, Any]]) -> dict[str, Any]:
    """The first value of each role."""
    found: dict[str, Any] = {}
    for name, value in pairs:
        role = building_role(str(name))
        if role not in (None, "config") and not isinstance(value, list | tuple | dict):
            found.setdefault(role, value)
    return found


def _is_number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


SET_ALWAYS = {"width", "heads", "context", "dropout", "batch_first", "out_width"}
"""Roles whose defaults give way: sizes of our own show more, and no chance hides a mistake."""


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

    def learn(self, sizes: BuildSizes) -> BuildSizes:
        """The sizes, with those that stand among the arguments under other names."""
        given = _flat({**self.placed, **self.given})
        numbers = _by_role(pair for pair in given if _is_number(pair[1]))
        pairs = {"embed_dim": "width", "num_heads": "heads", "num_kv_heads": "kv_heads"}
        pairs |= {"head_dim": "head_dim", "context_length": "context"}
        unknown = [name for name in pairs if getattr(sizes, name) is None]
        known = {name: numbers.get(pairs[name]) for name in unknown}
        code = getattr(getattr(self.factory, "__init__", None), "__code__", None)
        read = [name for name in getattr(code, "co_names", ()) if len(name) > 1]
        grouped = any(building_role(name) == "kv_heads" for name in (*self.names, *read))
        return dataclasses.replace(sizes, **known).settle(grouped)

    def work_out(self, sizes: BuildSizes) -> dict[str, Any]:
        """The arguments by name: those that are given, and those that their names tell."""
        kwargs, rest, unknown, free = {}, dict(self.given), [], False
        for parameter in self.parameters[len(self.args) :]:
            name, role = parameter.name, building_role(parameter.name)
            if parameter.kind is parameter.VAR_KEYWORD:
                free = True
            if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                continue
            required = parameter.default is parameter.empty
            choice = self._choice(parameter, sizes) if required and role is None else None
            role = building_role(name, needed=required)
            if name in rest:
                kwargs[name] = rest.pop(name)
            elif role == "config" and (required or self._config_class(name)):
                kwargs[name] = self._config(name, sizes, rest if required else {})
                rest = {} if required else rest
            elif role == "config":
                continue
            elif choice is not None:
                kwargs[name] = choice
            elif role is not None and (required or _gives_way(role, parameter.default, sizes)):
                value = sizes.value(role)
                if role == "window":
                    self.choices = max(self.choices, len(WINDOWS))
                    value = WINDOWS[self.place % len(WINDOWS)]
                if value is not Unknown:
                    kwargs[name] = value
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

    def _choice(self, parameter: inspect.Parameter, sizes: BuildSizes) -> Any:
        """A member of an enumeration, a word, no for a flag; or a module that is handed in: a
        projection, or the attention inside, where its file has one that can be built without a
        word."""
        if "Module" in str(parameter.annotation) and parts_of(parameter.name):
            return nn.Linear(*sizes.widths(parts_of(parameter.name)))
        if not re.search("att(n|ention)$", parameter.name):
            return _first_choice(self.factory, parameter)
        for name, kind in list(vars(sys.modules.get(self.factory.__module__, typing)).items()):
            if "Attention" in name and inspect.isclass(kind) and issubclass(kind, nn.Module):
                free = all(p.default is not p.empty or p.kind > 1 for p in signature(kind))
                if free and kind.__module__ == self.factory.__module__:
                    return kind()
        return None

    def _config_class(self, name: str) -> type | None:
        """The class of a configuration: as annotated, else the one that its file speaks of."""
        try:
            target = self.factory.__init__ if inspect.isclass(self.factory) else self.factory
            kind = typing.get_type_hints(target).get(name)
        except Exception:  # an annotation that cannot be read is no annotation
            kind = None
        for one in (kind, *typing.get_args(kind)):
            if inspect.isclass(one) and _can_be_built(one):
                return one
        home = vars(sys.modules.get(self.factory.__module__, typing))
        kinds = [
            one for key, one in home.items() if inspect.isclass(one) and key.endswith("Config")
        ]
        own = [one for one in kinds if getattr(one, "model_type", None)]
        self.choices = max(self.choices, len(own))
        return own[self.place % len(own)] if own else None

    def _config(self, name: str, sizes: BuildSizes, given: Mapping[str, Any]) -> Any:
        """The configuration: of its own class if there is one, else one that answers to all."""
        kind = self._config_class(name)
        if kind is None:
            return Config(sizes, given, self.needed)
        made = _Constructor(kind, (), given)
        kwargs = given if sizes.plain else made.work_out(sizes)
        config = kind(**{name: value for name, value in kwargs.items() if name in made.names})
        if getattr(config, "_attn_implementation", "") is None:  # transformers' models set it
            config._attn_implementation = "eager"
        return config

    def question(self, unknown: list[str], what: str) -> ValueError:
        """What has to be asked for."""
        name, plural = name_of(self.factory), "s" if len(unknown) > 1 else ""
        call = ", ".join(f"{one}=…" for one in unknown)
        flags = " ".join(f"--{one} …" for one in unknown)
        return ValueError(
            f"check({name}): what is to be given for the {what}{plural} {', '.join(unknown)} "
            f"cannot be worked out from the name{plural}; give it: hw.check({name}, {call}), or on "
            f"the command line {flags}"
        )


def _gives_way(role: str, default: Any, sizes: BuildSizes) -> bool:
    if role in sizes.changes:
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
    return role in SET_ALWAYS and default is not None and not isinstance(default, bool)


def _first_choice(factory: Callable[..., Any], parameter: inspect.Parameter) -> Any:
    """The first member of an enumeration, False for a flag, or the first word that the code
    compares an argument with; None where nothing tells.
    """
    if isinstance(parameter.annotation, enum.EnumMeta):
        return next(iter(parameter.annotation))
    if parameter.annotation in (bool, "bool"):
        return False
    try:
        source = inspect.getsource(factory)
    except (OSError, TypeError):
        return None
    words = re.search(rf"\b{parameter.name} (?:[=!]=|(?:not )?in) [(\[{{]?[\"'](\w+)[\"']", source)
    return None if words is None else words[1]


def _can_be_built(kind: type) -> bool:
    """Whether an annotation names a class of its own, not a dictionary or a protocol."""
    known = kind.__module__ in ("builtins", "typing") or issubclass(kind, Mapping)
    return not known and not getattr(kind, "_is_protocol", False)


def name_of(thing: Any) -> str:
    """What it is called, or what its class is."""
    return getattr(thing, "__name__", None) or type(thing).__name__


def facts(thing: Any) -> dict[str, Any]:
    """Sizes that an object tells by its attributes, its config's and its children's, by role.

    >>> facts(nn.MultiheadAttention(24, 3))["heads"]
    3
    """
    configs = (getattr(thing, name, None) for name in ("config", "cfg", "args", "params"))
    inside = list(thing.modules())[1:] if isinstance(thing, nn.Module) else []
    places = (_fields(place) for place in (thing, *configs, *inside))
    pairs = (pair for fields in places for pair in fields.items())
    return _by_role(pair for pair in pairs if _is_number(pair[1]) and pair[1] > 0)


def input_width(module: nn.Module) -> int | None:
    """The width of the input, from the first layer that it meets."""
    for child in module.modules():
        if isinstance(child, nn.LazyLinear):
            return None
        if isinstance(child, nn.Linear):
            return child.in_features
        weight = getattr(child, "weight", None)
        if type(child).__name__ == "Conv1D" and isinstance(weight, torch.Tensor):
            return weight.shape[0]
    return None


def matrix_width(module: nn.Module) -> int | None:
    """The same where matrices are written raw, as `x @ W`."""
    return next((p.shape[-2] for p in module.parameters() if p.ndim >= 2), None)
