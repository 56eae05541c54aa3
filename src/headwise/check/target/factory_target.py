"""Make the target for a class or a factory: its arguments, and other sizes where they fail."""

from __future__ import annotations

import contextlib
import functools
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ..findings.rules import found
from .checked_target import Target
from .construct import as_typed, build, name_of
from .errors import Broken, told, variable_read, wants_memory
from .introspect import facts, input_width, own_sizes
from .kinds import is_function_of_qkv
from .masking import MASKS, shows_next
from .memory import marked, unset_in
from .module_target import Request, heads_of, module_target, width_of, without_weights
from .names import building_role
from .refusals import unset_variable
from .retries import SECONDS, UNMADE, blamed, fitted, other_sizes
from .signatures import signature
from .sizes import BuildSizes, shown
from .unknowns import is_apart


def factory_target(
    factory: Callable[..., Any],
    args: tuple[Any, ...],
    arguments: dict[str, Any],
    request: Request,
) -> Target:
    """Make the target for a class or a factory, with other sizes where the first ones fail.

    Args:
        args: of the call, and all others, as `resolve` takes them.

    Raises:
        ValueError: something must be given that cannot be worked out.
        Broken: it cannot be built, or its first call fails.
    """
    own = request.sizes
    build = _Factory(factory, args, arguments, request)
    try:
        subject = build(request)
    except (Broken, ValueError) as first:
        given = bool(args or arguments or request.call or own.num_heads or own.embed_dim)
        return _of_other_sizes(build, request, first, given)
    flags = (p for p in signature(factory) if building_role(p.name) == "causal")
    if subject.causal_from == "named" and any(one.default is False for one in flags):
        with contextlib.suppress(Broken, ValueError):  # its name says more than the default
            return build(replace(request, sizes=replace(own, causal=True)))
    if subject.causal_from == "named":  # one that has to be given and was not
        return _as_named(build, request, subject) or subject
    return subject


def _as_named(build: _Factory, request: Request, subject: Target) -> Target | None:
    """The target with the flag that makes it causal, where it is named so and the flag was made up
    to be off; None where there is none."""
    for name, value in subject.arguments.items():
        if value is False and name not in build.said:
            with contextlib.suppress(Broken, ValueError):
                other = build(replace(request, sizes=replace(request.sizes, changes={name: True})))
                if other.causal_from == "seen":
                    return other
    return None


def _of_other_sizes(
    build: _Factory, request: Request, first: Broken | ValueError, given: bool
) -> Target:
    """The target with the sizes that work, where those that were tried first did not.

    Raises:
        ValueError, Broken: none do; whichever tells most.
    """
    until, others = time.thread_time() + SECONDS, list[Exception]()
    tries = other_sizes(build.factory, request.sizes, first, given, build.widths)
    for sizes in tries if given else fitted(tries, others):
        if time.thread_time() > until:
            break
        try:
            subject = build(replace(request, sizes=sizes))
            if not _hides_groups(subject) or not isinstance(first, Broken):
                return subject
            others.append(first)
        except (Broken, ValueError) as error:
            others.append(error)
            if isinstance(error, Broken) and error.finding.ground == "any":
                break  # whatever its sizes are
    fault = blamed(first, others, build.factory, given, build.told_all)
    raise fault from fault.__cause__ or first.__cause__


class _Factory:
    """A class or a factory, and what was said of its arguments. Called, it gives a target.

    Attributes:
        widths: of the input as it was built first, where it was.
        told_all: whether every argument was said that it must get.
    """

    def __init__(
        self,
        factory: Callable[..., Any],
        args: tuple[Any, ...],
        arguments: dict[str, Any],
        request: Request,
    ) -> None:
        self.factory, self.args, self.label = factory, args, name_of(factory)
        self.names = [p.name for p in signature(factory)][len(args) :]
        self.widths = list[int | None]()
        sizes = {n: getattr(request.sizes, n) for n in ("embed_dim", "num_heads", "num_kv_heads")}
        sizes = {n: size for n, size in sizes.items() if size is not None and n in self.names}
        self.said = arguments | sizes
        needed = [
            p.name for p in signature(factory) if p.default is p.empty and p.kind in (0, 1, 3)
        ]
        self.told_all = {*needed[len(args) :]} <= {*self.said}

    def __call__(self, request: Request, /, seed: int | None = None, **changes: Any) -> Target:
        """Build it, and find how what it gives is called.

        Args:
            seed: of its weights; None for the request's.
            changes: values of its arguments, or of roles, in place of those that it had.
        """
        sizes = replace(request.sizes, changes=request.sizes.changes | changes)
        target, named, roles, made_up = self._built(sizes, request.seed if seed is None else seed)
        if not self.widths:
            self.widths.append(input_width(target) if isinstance(target, nn.Module) else None)
        made_up |= request.sizes.changes
        name = f"{self.label}({shown(named)})"
        made = {
            "factory": functools.partial(self, request),
            "arguments": named,
            "made_up": made_up,
            "unset": unset_in(target),
        }
        if request.call is None and is_function_of_qkv(target, {}):
            subject = without_weights(target, name, roles, request)
            return replace(subject, roles=roles, **made)
        known = facts(target)
        if sizes.plain:  # a configuration may speak of several layers
            roles = {**roles, **{name: known[name] for name in ("width", "heads") if name in known}}
            if isinstance(target, nn.Module) and (wide := input_width(target)):
                roles["width"] = wide
        own = input_width(target) if changes and isinstance(target, nn.Module) else None
        if own and own in self.widths and roles.get("width") not in (None, own):
            roles = roles | {"width": own}  # which is the file's, whatever it is told
        roles = own_sizes(roles, target)
        heads = roles.get("heads") or known.get("heads") or heads_of(target) or 1
        known |= roles
        width = roles.get("width") or width_of(target, known) or sizes.embed_dim or 24
        try:
            subject = module_target(target, name, width, heads, known, request, roles)
        except (RuntimeError, MemoryError) as error:
            if not wants_memory(error):
                raise
            raise ValueError(
                f"check({name}): with these sizes it takes more memory than there is; give smaller "
                f"ones: {as_typed(self.factory, self.names)}"
            ) from error
        except Broken as broken:
            raise self._blamed(broken, request, name, made_up) from broken.__cause__
        return replace(subject, **made)

    def _built(
        self, sizes: BuildSizes, seed: int
    ) -> tuple[Any, dict[str, Any], dict[str, Any], dict[str, Any]]:
        """What `build` gives for the sizes, where no argument is given twice."""
        changes = sizes.changes
        own = {name: v for name, v in self.said.items() if building_role(name) not in changes}
        own |= {name: changes[name] for name in changes if name in self.names}
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return _built(self.factory, self.args, own, sizes)

    def _blamed(
        self, broken: Broken, request: Request, name: str, made_up: Mapping[str, Any]
    ) -> Exception:
        """The failure of a first call where it is the layer's own, else a question for what was
        made up."""
        if made_up and is_apart(broken.__cause__, made_up.values()):
            broken.finding = replace(broken.finding, ground="any")
        if _comes_from(broken.__cause__, made_up.values()):
            broken.finding = replace(broken.finding, ground="call")
        if not made_up or broken.finding.ground == "any" or self._alike(request, broken, made_up):
            return broken
        guessed = ", ".join(f"{name}={value!r}" for name, value in made_up.items())
        return ValueError(
            f"check({name}): I made up {guessed}, and with it the call fails: give what is meant: "
            f"{as_typed(self.factory, made_up)}. {broken.finding.message}"
        )

    def _alike(self, request: Request, broken: Broken, made_up: Mapping[str, Any]) -> bool:
        """Whether other numbers in place of those that were made up fail with the same shapes."""
        numbers = {n: one for n, one in made_up.items() if type(one) is int and n in self.names}
        if len(numbers) < len(made_up) or not isinstance(broken.__cause__, RuntimeError):
            return False
        try:
            self(request, **{name: 2 * one for name, one in numbers.items()})
        except (Broken, ValueError) as other:
            return str(other.__cause__) == str(broken.__cause__)
        return False


def _built(
    factory: Callable[..., Any], args: tuple[Any, ...], own: dict[str, Any], sizes: BuildSizes
) -> tuple[Any, dict[str, Any], dict[str, Any], dict[str, Any]]:
    """What `build` gives, in a dtype that all of it has.

    Raises:
        ValueError: an argument that has to be asked for, or what it gives computes nothing.
        Broken: it cannot be built, or what it gives cannot be called or listed.
    """
    label = name_of(factory)
    try:
        with marked():
            made = build(factory, args, own, sizes)
    except Exception as error:
        if isinstance(error, ValueError) and str(error).startswith("check("):
            raise
        if variable := variable_read(error):
            raise unset_variable(label, variable, error) from error
        way = "super" if UNMADE.search(str(error)) else "fails"
        raise Broken(found("builds", way, label=label, error=told(error))) from error
    target = made[0]
    if isinstance(target, nn.Module):
        odd = [type(one) for one in (target, *_inner(target)) if type(one).__hash__ is None]
        if odd:
            raise Broken(found("builds", "unhashable", label=label, name=odd[0].__name__))
        half = {torch.bfloat16, torch.float16}
        if half & {one.dtype for one in target.parameters()}:  # others may be of another dtype
            target.float()
    elif not callable(target):
        kind = type(target).__name__
        public = (getattr(target, one) for one in dir(target) if not one.startswith("_"))
        other = not hasattr(target, "forward") and any(map(callable, public))
        if isinstance(target, Tensor) and MASKS.search(label.lower()) and shows_next(target):
            raise Broken(found("causality", "next"))
        if isinstance(target, Tensor) or other:  # a mask or a table, say: no mistake
            raise ValueError(
                f"check({label}): it gives a {kind} for sizes; name what computes attention"
            )
        inside = getattr(target, "__dict__", {})
        held = [name for name, one in inside.items() if isinstance(one, nn.Module)]
        if held:
            raise Broken(found("registered", "class", kind=kind, names=", ".join(held[:4])))
        raise Broken(found("builds", "result", label=label, kind=kind))
    return made


def _inner(module: nn.Module) -> Iterator[nn.Module]:
    """The modules within, which PyTorch itself only lists where they can be put into a set."""
    for child in module._modules.values():
        if child is not None:
            yield from (child, *_inner(child))


def _comes_from(error: BaseException | None, values: Iterable[Any]) -> bool:
    """Whether an error was raised where one of these modules is called."""
    made = [one for one in values if isinstance(one, nn.Module)]
    frames = traceback.walk_tb(error.__traceback__ if error and made else None)
    return any(frame.f_locals.get("self") is one for frame, _ in frames for one in made)


def _hides_groups(subject: Target) -> bool:
    """Whether its keys have one head, which fits any number, or as many as go with each of them:
    then a mistake in how often they are repeated does not show."""
    groups = subject.num_kv_heads or subject.num_heads
    return groups < subject.num_heads and groups in (1, subject.num_heads // groups)
