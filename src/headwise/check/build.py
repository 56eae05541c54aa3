"""Make a `Target` from a module, a class or factory with arguments, or a function of q, k and v.

Constructor arguments with usual names are set; a `Question` lists all other required arguments
by name.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import sys
import typing
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from .call import AXES, FunctionLayer, ShownCall, first_line, is_function_of_qkv, plain_call
from .code import (
    describe,
    input_width,
    line_of,
    name_of,
    number_of_heads,
    required,
    signature,
    sizes_in,
)
from .names import building_role
from .rules import violation
from .target import Question, Result, Target, Unusable, copied
from .verdict import Finding

CONTEXT = 16
"""The context length of a layer that requires one; all probes but one need less."""


class Broken(Exception):
    """Raised if the target cannot be imported, built or called; `finding` gives the reason."""

    def __init__(self, finding: Finding) -> None:
        super().__init__(finding.message)
        self.finding = finding


@dataclass(frozen=True)
class Sizes:
    """The sizes that the caller gave; the others are chosen so that all axes differ in size."""

    embed_dim: int | None = None
    num_heads: int | None = None
    num_kv_heads: int | None = None
    causal: bool | None = None

    def complete(self, grouped: bool) -> Sizes:
        """Choose a width and a number of heads if they were not given."""
        embed, heads, groups = self.embed_dim, self.num_heads, self.num_kv_heads
        share = 3 if groups == 2 else 2
        if heads is None and embed is None:
            heads = share * groups if groups else 6 if grouped else 3
            embed = 24 if 24 % heads == 0 and not grouped else 8 * heads
        elif heads is None:
            assert embed is not None
            wanted = (
                [share * groups, groups] if groups else [6] * grouped + [3, 2, 4, 6, 5, 7, 8, 12, 1]
            )
            fits = [n for n in wanted if embed % n == 0]
            heads = next((n for n in fits if n * n != embed), fits[0] if fits else 1)
        elif embed is None:
            embed = (8 if heads != 8 else 5) * heads
        return replace(self, embed_dim=embed, num_heads=heads)

    def value(self, role: str) -> Any:
        """Return the value for an argument of this role.

        Raises:
            KeyError: an unknown role.
        """
        embed, heads = self.embed_dim or 24, self.num_heads or 3
        groups = self.num_kv_heads or (heads // 2 if heads % 2 == 0 else heads)
        return {
            **dict.fromkeys(("width", "out_width", "kv_width"), embed),
            "heads": heads,
            "kv_heads": groups,
            "head_dim": max(1, embed // heads),
            "context": CONTEXT,
            "causal": bool(self.causal),
            "dropout": 0.0,
            "bias": True,
            "batch_first": True,
            "batch": 4,
            "layer": 0,
            "layers": 2,
            "vocabulary": 11,
            "device": None,
            "dtype": torch.float32,
            "window": 4,
            "eps": 1e-6,
            "base": 10000.0,
            "inner": 2 * embed + 1,
        }[role]


@dataclass(frozen=True)
class Request:
    """The caller's information about the target, apart from constructor arguments."""

    sizes: Sizes
    seed: int = 0
    call: Callable[..., Any] | None = None


ALWAYS = set("width heads context dropout batch_first out_width kv_width head_dim kv_heads".split())
"""Roles whose default values are replaced by the check's own, which reveal more mistakes."""


def resolve(
    thing: Any, args: tuple[Any, ...], arguments: dict[str, Any], request: Request
) -> Target:
    """Make the target.

    Raises:
        Question: an argument or a call must be given.
        Broken: it cannot be built, or its first call fails.
    """
    thing = getattr(thing, "_orig_mod", thing)  # the module inside torch.compile
    if isinstance(thing, nn.Module):
        if args or arguments:
            raise Question(
                f"check({name_of(thing)}(…), {_shown(arguments) or '…'}): this is an instance; "
                "pass constructor arguments together with the class"
            )
        if is_function_of_qkv(thing) and request.call is None:
            return _of_function(thing, {}, request)
        known = sizes_in(thing)
        return _of_layer(copied(thing), f"{name_of(thing)}(…)", known, request)
    if not callable(thing):
        raise Question(
            f"check({thing!r}): the argument must be a module, a class with its arguments, "
            f"or a function of q, k and v, got {type(thing).__name__}"
        )
    if is_function_of_qkv(thing) and request.call is None:
        return _of_function(thing, arguments, request)
    return _of_class(thing, args, arguments, request)


# --- classes and factories ------------------------------------------------------------------------


def _of_class(
    factory: Callable[..., Any], args: tuple[Any, ...], arguments: dict[str, Any], request: Request
) -> Target:
    label = name_of(factory)
    build = _Constructor(factory, args, arguments, request.sizes)
    named = build.arguments()
    name = f"{label}({_shown(named)})"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(request.seed)
        try:
            layer = factory(*args, **named)
        except Question:
            raise
        except (Exception, SystemExit) as error:
            raise _not_built(label, named, build, error) from error
    if not isinstance(layer, nn.Module):
        kind = type(layer).__name__
        if inspect.isclass(factory) and callable(layer) and is_function_of_qkv(layer):
            return _of_function(layer, {}, request)
        raise Broken(violation("builds", "result", label=label, kind=kind))
    if is_function_of_qkv(layer) and request.call is None:
        return _of_function(layer, {}, replace(request, sizes=build.sizes))
    known = {**sizes_in(layer), **build.roles}
    target = _of_layer(layer, name, known, request)
    target.arguments, target.roles = named, build.roles

    def again(seed: int = request.seed, **changes: Any) -> Target:
        own = {**arguments, **_by_name(named, changes)}
        return _of_class(factory, args, own, replace(request, seed=seed))

    target.rebuild = again
    return target


def _by_name(named: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Convert changes keyed by role to changes keyed by the arguments with these roles."""
    done = {}
    for role, value in changes.items():
        names = [name for name in named if building_role(name) == role]
        done |= dict.fromkeys(names or [role], value)
    return done


def _not_built(
    label: str, named: Mapping[str, Any], build: _Constructor, error: BaseException
) -> Exception:
    """Return a finding about a failing constructor, or a question if an argument may be missing."""
    inner = getattr(error, "args", ("",))
    if isinstance(error, MissingField):
        return Question(
            f"check({label}): its configuration needs `{inner[0]}`, which cannot be guessed; "
            f"pass it: hw.check({label}, {inner[0]}=…) or --{inner[0]} …"
        )
    own = isinstance(error, (NameError, AttributeError))
    refused = isinstance(error, (ValueError, AssertionError)) or set(named) - set(build.given)
    if not line_of(error) or (refused and not own):  # a default may be of the wrong type
        return Question(
            f"check({label}): {label}({_shown(named)}) fails: {describe(error)}. Pass what it "
            f"needs: hw.check({label}, {', '.join(f'{n}=…' for n in build.names)})"
        )
    return Broken(
        violation("builds", "fails", label=f"{label}({_shown(named)})", error=describe(error))
    )


class MissingField(AttributeError, KeyError):
    """A configuration lacks a field whose role is unknown."""

    def __str__(self) -> str:
        return f"the configuration has no field {self.args[0]!r}"


class Config(dict[str, Any]):
    """A configuration whose fields are available under all usual names, as attributes and as keys.

    >>> config = Config(Sizes(24, 3), {})
    >>> config.n_embd, config["num_heads"], getattr(config, "flash", False)
    (24, 3, False)
    """

    def __init__(self, sizes: Sizes, given: Mapping[str, Any]) -> None:
        super().__init__(given)
        self.__dict__["_sizes"], self.__dict__["_roles"] = sizes, {}

    def _look(self, name: str) -> Any:
        if dict.__contains__(self, name):
            return dict.__getitem__(self, name)
        role = building_role(name)
        if role is None or role == "config":
            raise MissingField(name)
        self._roles[role] = value = self._sizes.value(role)
        return value

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return self._look(name)

    def __getitem__(self, name: str) -> Any:
        return self._look(name)

    def __contains__(self, name: object) -> bool:
        return dict.__contains__(self, name) or (
            isinstance(name, str) and building_role(name) not in (None, "config")
        )

    def get(self, name: str, default: Any = None) -> Any:
        """Return the field, or the default if its role is unknown."""
        try:
            return self._look(name)
        except MissingField:
            return default


class _Constructor:
    """A class or factory and its arguments."""

    def __init__(
        self,
        factory: Callable[..., Any],
        args: tuple[Any, ...],
        given: Mapping[str, Any],
        sizes: Sizes,
    ) -> None:
        self.factory, self.given, self.label = factory, dict(given), name_of(factory)
        parameters = signature(factory)
        self.names = [one.name for one in parameters]
        self.placed = dict(zip(self.names, args, strict=False))
        self.free = [one for one in parameters[len(args) :]]
        self.roles: dict[str, Any] = {}
        stated = [*self.placed.items(), *self.given.items()]
        numbers = {building_role(name): v for name, v in stated if type(v) is int}
        pairs = {"embed_dim": "width", "num_heads": "heads", "num_kv_heads": "kv_heads"}
        known = {
            name: numbers.get(role) for name, role in pairs.items() if getattr(sizes, name) is None
        }
        grouped = any(building_role(name) == "kv_heads" for name in self._spoken())
        self.sizes = replace(sizes, **{k: v for k, v in known.items() if v is not None}).complete(
            grouped
        )
        if not any(building_role(n) == "width" for n in self.names) and numbers.get("head_dim"):
            heads = self.sizes.num_heads or 1
            if sizes.embed_dim is None and "width" not in numbers:
                self.sizes = replace(self.sizes, embed_dim=heads * numbers["head_dim"])

    def _spoken(self) -> list[str]:
        code = getattr(getattr(self.factory, "__init__", None), "__code__", None)
        names = [*self.names, *(n for n in getattr(code, "co_names", ()) if len(n) > 1)]
        for name in self.names:
            kind = self._config_class(name) if building_role(name) == "config" else None
            names += [] if kind is None else [one.name for one in signature(kind)]
        return names

    def arguments(self) -> dict[str, Any]:
        """Return the arguments by name.

        Raises:
            Question: a required argument is missing, or an unknown one was given.
        """
        rest, named, unknown, open_ = dict(self.given), dict[str, Any](), list[str](), False
        for one in self.free:
            name, role = one.name, building_role(one.name)
            if one.kind == one.VAR_KEYWORD:
                open_ = True
            if one.kind in (one.VAR_POSITIONAL, one.VAR_KEYWORD):
                continue
            if name in rest:
                named[name] = rest.pop(name)
            elif role == "config" and required(one):
                fields = {key: rest[key] for key in rest if key not in self.names}
                named[name] = self._config(name, fields)
                rest = {key: value for key, value in rest.items() if key not in fields}
            elif role not in (None, "config") and self._is_set(one, role):
                named[name] = self.sizes.value(role)
            elif required(one):
                if one.annotation in (bool, "bool"):
                    named[name] = False
                else:
                    unknown.append(name)
        if rest and not open_:
            raise Question(
                f"check({self.label}, {_shown(rest)}): the constructor has no argument "
                f"{', '.join(rest)}; it has {', '.join(self.names) or 'none'}"
            )
        if unknown:
            forms = ", ".join(f"{name}=…" for name in unknown)
            typed = " ".join(f"--{name} …" for name in unknown)
            raise Question(
                f"check({self.label}): the constructor takes {', '.join(unknown)}, which cannot be "
                f"guessed; pass it: hw.check({self.label}, {forms}), or in the shell {typed}"
            )
        named |= rest
        for name, value in {**self.placed, **named}.items():
            fields = {name: value}
            if building_role(name) == "config":
                fields = dict(vars(value)) if not isinstance(value, Mapping) else dict(value)
            for key, number in fields.items():
                if (role := building_role(key)) is not None and not isinstance(number, bool | dict):
                    self.roles.setdefault(role, number)
        return named

    def _is_set(self, one: inspect.Parameter, role: str) -> bool:
        """Return True if the check sets an argument: if it is required, or its default hides
        mistakes. A default of None means that the layer determines the value."""
        if required(one):
            return True
        if role == "window" and type(one.default) is int:
            return one.default > self.sizes.value("window")  # a narrow window reveals more
        if role not in ALWAYS or one.default is None:
            return False
        return not isinstance(one.default, bool) or role == "batch_first"

    def _config_class(self, name: str) -> type | None:
        """Return the class of a configuration: the annotation, or the file's only `…Config` or
        `…Args`."""
        target = self.factory.__init__ if inspect.isclass(self.factory) else self.factory
        try:
            kind = typing.get_type_hints(target).get(name)
        except Exception:  # treat an unreadable annotation as missing
            kind = None
        for one in (kind, *typing.get_args(kind)):
            if inspect.isclass(one) and one.__module__ not in ("builtins", "typing"):
                plain_class = not (issubclass(one, Mapping) or getattr(one, "_is_protocol", False))
                return one if plain_class else None
        home = vars(sys.modules.get(self.factory.__module__, typing))
        own = [
            one
            for key, one in home.items()
            if inspect.isclass(one)
            and one.__module__ == self.factory.__module__
            and key.lower().endswith(("config", "args", "params", "hparams"))
        ]
        return own[0] if len(own) == 1 else None

    def _config(self, name: str, fields: Mapping[str, Any]) -> Any:
        """Return a configuration with the check's sizes."""
        kind = self._config_class(name)
        if kind is None:
            return Config(self.sizes, fields)
        inner = _Constructor(kind, (), {}, self.sizes)
        inner.sizes = self.sizes
        sized: dict[str, Any] = {}
        for one in signature(kind):
            role = building_role(one.name)
            if one.name in fields:
                sized[one.name] = fields[one.name]
            elif role not in (None, "config") and inner._is_set(one, role):
                sized[one.name] = self.sizes.value(role)
        if dataclasses.is_dataclass(kind) or signature(kind):
            try:
                config = kind(**sized)
            except Exception as error:
                raise Question(
                    f"check({self.label}): {name_of(kind)}({_shown(sized)}) fails "
                    f"({describe(error)}); pass it: "
                    f"hw.check({self.label}, {name}={name_of(kind)}(…))"
                ) from error
        else:
            config = kind()
        for key in [key for key in dir(config) if not key.startswith("__")]:  # for plain classes
            role = building_role(key)
            if key not in sized and role in ALWAYS and type(getattr(config, key, None)) is int:
                setattr(config, key, self.sizes.value(role))
        for key, value in fields.items():
            setattr(config, key, value)
        return config


def _shown(arguments: Mapping[str, Any]) -> str:
    """Return arguments as Python code."""

    def typed(value: Any) -> str:
        text = repr(value)
        return text if len(text) < 40 and "\n" not in text else f"{type(value).__name__}(…)"

    return ", ".join(f"{name}={typed(value)}" for name, value in arguments.items())


# --- layers ---------------------------------------------------------------------------------------


def _of_layer(layer: nn.Module, name: str, known: dict[str, Any], request: Request) -> Target:
    """Make the target from a layer; `known` holds its sizes by role."""
    sizes = request.sizes
    if any(one.is_meta for one in layer.parameters()):
        raise Question(f"check({name}): its weights are on the meta device and have no values")
    width = sizes.embed_dim or input_width(layer, known.get("width"))
    heads = sizes.num_heads or known.get("heads") or number_of_heads(layer)
    for size, what, argument in (
        (width, "the width of its input", "embed_dim=24"),
        (heads, "its number of heads", "num_heads=3"),
    ):
        if size is None:
            raise Question(
                f"check({name}): {what} is not known; pass it: hw.check(layer, {argument})"
            )
    assert width is not None
    assert heads is not None
    layer.eval()
    layer = layer.cpu()
    call = plain_call(layer, name) if request.call is None else ShownCall(request.call, name)
    dtypes = [one.dtype for one in layer.parameters() if one.is_floating_point()]
    target = Target(
        name=name,
        layer=layer,
        call=call,
        embed_dim=width,
        num_heads=heads,
        num_kv_heads=sizes.num_kv_heads or known.get("kv_heads"),
        head_dim=known.get("head_dim") or max(1, width // heads),
        context_length=known.get("context"),
        dtype=dtypes[0] if dtypes else torch.float32,
        seed=request.seed,
        shown=request.call is not None,
        given_causal=sizes.causal,
    )
    result = first_call(target)
    if hasattr(layer, "block_size"):  # it may be a blocked softmax's, not the context length
        with suppress(Exception):
            longer = replace(target, context_length=None)
            first_call(longer)
            target = longer
    target.out_dim = result.out.shape[-1]
    return target


def first_call(target: Target) -> Result:
    """Call a target for the first time.

    Raises:
        Question: the call fails, and another call may be intended.
        Broken: the file does not define a name that it uses, or the shown call fails in the layer.
    """
    x = target.input()
    what = f"x {list(x.shape)}"
    try:
        with torch.no_grad():
            return target.result(x)
    except (Question, Broken):
        raise
    except Unusable as error:
        if target.shown:
            raise Broken(violation("shape", "unusable", what=what, error=error)) from error
        raise Question(
            f"check({target.name}): for {what} {error}; an output must be [B, T, out_dim]. "
            f"{_example()}"
        ) from error
    except Exception as error:
        line = line_of(error)
        own = isinstance(error, (NameError, AttributeError)) and line is not None
        own = own and "'NoneType' object" not in str(error)  # an argument may be missing
        if own or target.shown:
            raise Broken(violation("runs", "fails", what=what, error=describe(error))) from error
        if isinstance(error, NotImplementedError):
            raise Broken(violation("runs", "forward", label=target.name)) from error
        raise Question(
            f"check({target.name}): the call layer(x) on {what} fails: {describe(error)}. "
            f"{first_line(error)} {_example()}"
        ) from error


def _example() -> str:
    return 'Otherwise show one call: --call "lambda layer, x: layer(x)" (in Python: call=lambda …)'


# --- functions ------------------------------------------------------------------------------------


def _of_function(function: Any, arguments: dict[str, Any], request: Request) -> Target:
    """Make the target from a function of q, k and v; find the layout of its tensors by trial."""
    sizes = request.sizes.complete(request.sizes.num_kv_heads is not None)
    width, heads = sizes.embed_dim or 24, sizes.num_heads or 3
    groups = sizes.num_kv_heads or heads
    label = f"{name_of(function)}(q, k, v{', ' * bool(arguments)}{_shown(arguments)})"
    failed: Exception | None = None
    chosen: Target | None = None
    for axes in AXES:
        own = (1, 1) if axes == "flat" else (heads, groups)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(request.seed)
            layer = FunctionLayer(function, axes, width, *own)
        sized = replace(request, sizes=replace(sizes, num_heads=own[0], num_kv_heads=own[1]))
        try:
            known = {"head_dim": width // own[0]}
            target = _of_layer(_bound(layer, arguments), label, known, sized)
        except Question as error:
            failed = failed or error
            if "which cannot be guessed" in str(error):
                raise
            continue
        except Broken as error:
            failed = error
            continue
        mixes = target.influence(target.input())
        if bool((mixes.fill_diagonal_(0) > 0).any()):
            target.observed.append(f"q, k and v {AXES[axes]}")
            return target
        chosen = chosen or target
    if chosen is not None:
        return chosen
    assert failed is not None
    raise failed


def _bound(layer: FunctionLayer, arguments: dict[str, Any]) -> FunctionLayer:
    if arguments:
        known = [one.name for one in signature(layer.function)]
        odd = [name for name in arguments if name not in known]
        if odd:
            raise Question(
                f"check(…, {_shown(arguments)}): the function has no argument {', '.join(odd)}; "
                f"it has {', '.join(known)}"
            )
        layer.function = functools.partial(layer.function, **arguments)
        named = [
            p
            for p in inspect.signature(layer.forward_like).parameters.values()
            if p.name not in arguments
        ]
        layer.forward_like.__signature__ = inspect.Signature(named)  # type: ignore[attr-defined]
    return layer
