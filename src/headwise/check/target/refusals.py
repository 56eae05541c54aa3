"""What is said of a call that fails: that somebody has to show the call, or what is wrong."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from typing import NoReturn

from ..findings.rules import found
from ..findings.verdict import Finding, Ground
from .call_adapter import UnusableResult
from .call_faults import is_miscalled, of_guess, pools, set_by, wants_kernel
from .checked_target import BATCH, TOKENS, Target
from .errors import Broken, failing_line, is_users, told, variable_read
from .shown_call import refuse_shown, shapes
from .signatures import other_methods
from .unknowns import fails_anyway, is_certain

OF_SCORES = re.compile(r"\b(q|k|quer(y|ies)|keys?|scores?|att\w*|w_?[qkv]|[qkv]_proj)\b")
"""Names in a line that makes queries and keys, scores or weights."""


def refuse(subject: Target, error: BaseException, own: bool) -> NoReturn:
    """Raise what is to be said of a call in the usual way that fails.

    Args:
        own: whether it is known to be the layer's own fault.
    """
    caller, shape = subject.caller, [BATCH, TOKENS, subject.embed_dim]
    if wants_kernel(error):
        raise ValueError(
            f"check({subject.name}): its call wants a GPU, which is not here: {told(error)}"
        ) from error
    if variable := variable_read(error):
        raise unset_variable(subject.name, variable, error) from error
    made_up = caller.custom is None and (caller.made_up or of_guess(subject, error))
    own = own or isinstance(error, NameError) or "modified inplace" in str(error)
    own = own or is_miscalled(subject, error)
    guessed = (subject.guesses or made_up) and not own  # own is wrong whatever goes in
    sure = fails_anyway(subject)
    for fault in filter(None, (error, sure)):
        if (unset := _set_elsewhere(subject, fault)) is not None:
            raise unset from fault
    if sure is not None and (guessed or is_certain(sure)):
        broken = not_run(f"x {shape}, whatever else is given,", sure)
        ground: Ground = "any" if is_certain(sure) else "call"
        raise Broken(replace(broken.finding, ground=ground)) from sure
    if (sides := _exchanged(subject, error)) is not None:
        raise Broken(sides) from error
    if leaves_heads_apart(subject, error):
        raise Broken(replace(_other_shape(shape, error), ground="any")) from error
    if caller.custom is not None:
        refuse_shown(subject, caller.custom, error)
    if guessed or _lacks_a_package(error):
        raise how_to_call(subject, error) from error
    if isinstance(error, UnusableResult):
        own_number = "count" in subject.roles or "H" in caller.layout.axes
        weights = error.shape == [BATCH, TOKENS]
        if own_number or weights or pools(caller, error):
            raise how_to_call(subject, error) from error
        raise Broken(_other_shape(shape, error)) from error
    broken = not_run(f"x {shape}", error)
    if own:
        broken.finding = replace(broken.finding, ground="any")
    raise broken from error


def unset_variable(label: str, name: str, error: BaseException) -> ValueError:
    """That a variable of the environment has to be set first."""
    return ValueError(
        f"check({label}): it reads {name} of the environment, which is not set: in Python set "
        f"os.environ[{name!r}] before hw.check(…); before the command those of torchrun may stand, "
        f"LOCAL_RANK=0 headwise check …. {told(error)}"
    )


def _other_shape(x: list[int], error: BaseException) -> Finding:
    return found("shape", "result", x=x, error=error, B=BATCH, T=TOKENS)


def leaves_heads_apart(subject: Target, error: BaseException) -> bool:
    """Whether a call gives `[B, H, T, D]`, whatever else it was given."""
    apart, shape = [BATCH, subject.num_heads, TOKENS], getattr(error, "shape", [])
    weights = shape[-1:] == [TOKENS]
    return "heads" in subject.roles and shape[:-1] == apart and not weights


def _exchanged(subject: Target, error: BaseException) -> Finding | None:
    """That maps come out with height and width exchanged, or spread over a square, where the code
    itself says which axes x has."""
    layout, caller = subject.caller.layout, subject.caller
    if not isinstance(error, UnusableResult) or "H" not in layout.axes or caller.made_up:
        return None
    x, out = [*layout.into(subject.input()).shape], error.shape
    height, width = (layout.axes.index(side) for side in "HW")
    turned, square = x.copy(), x.copy()
    turned[height], turned[width] = x[width], x[height]
    square[height] = square[width] = max(x[height], x[width])
    told = layout is caller.usual and x[height] != x[width] and out in (turned, square)
    return found("shape", "sides", x=x, out=out) if told else None


def how_to_call(subject: Target, error: BaseException) -> ValueError | Broken:
    """That somebody has to say how it is called; or what is wrong where nothing else would do."""
    if (lacks := not_there(error)) is not None:
        return lacks
    if _lacks_a_package(error):
        return ValueError(
            f"check({subject.name}): its call wants what could not be imported here: "
            f"{told(error)}{install(error)}"
        )
    caller = subject.caller
    given = ", ".join(["x"] * max(1, len(caller.inputs)) + [f"{n}=…" for n in caller.made_up])
    method = next((f".{name}" for name in other_methods(caller.target)), "")
    failed = "…" if given == "x" and not method else given  # that very call
    call = f"lambda layer, x: layer{method}({failed})"
    unknown = "I do not know how to call this"
    if caller.guessed:
        unknown = f"what its call wants for {', '.join(caller.guessed)} cannot be worked out"
    return ValueError(
        f'check({subject.name}): {unknown}: show me, on the command line with --call "{call}", in '
        f"Python with hw.check(…, call={call}). {shapes(subject)}. A call that I made up fails: "
        f"{told(error)}{install(error)}"
    )


def _lacks_a_package(error: BaseException) -> bool:
    return isinstance(error, ImportError) and bool(error.name)


def _set_elsewhere(subject: Target, error: BaseException) -> ValueError | None:
    """That a method has to be called first, where only that sets what the call reads."""
    setters = set_by(error)
    if not setters or type(getattr(error, "obj", None)) is not type(subject.module):
        return None
    name = getattr(error, "name", "")
    return ValueError(
        f"check({subject.name}): its call reads {name}, set by {' and '.join(setters)} alone: "
        f'show a call that does so first: --call "lambda layer, x: (layer.{setters[0]}(…), '
        f'layer(x))[-1]"'
    )


def not_there(error: BaseException | None) -> Broken | None:
    """That a package of the file's own lacks the part that is imported of it."""
    name = (error.name if isinstance(error, ImportError) else None) or ""
    package = name.rpartition(".")[0]
    folders = [*getattr(sys.modules.get(package), "__path__", ())]
    if error is None or not folders or not is_users(folders[0]):
        return None
    words = {"name": name, "package": package, "error": str(error), "line": ""}
    return Broken(found("file-import", "part", **words))


def install(error: BaseException) -> str:
    """What to type where a package is not there; nothing where it is, but not that part of it."""
    missing = ((error.name if isinstance(error, ImportError) else None) or "").split(".")[0]
    there = not missing or missing in sys.modules
    return "" if there else f"; it wants a package: pip install {missing}"


def not_run(what: str, error: BaseException) -> Broken:
    """A first call that fails, with what its error says of the reason."""
    text, way, line = str(error), "other", failing_line(error)
    if "mat1 and mat2" in text or "size mismatch" in text:
        way = "scores" if OF_SCORES.search(line) else "matrices"
    elif ("view" in text and "contiguous" in text) or "view size" in text:
        way = "view"
    elif "must match" in text or "shape" in text or "expected" in text.lower():
        way = "masks" if "mask" in line or OF_SCORES.search(line) else "shapes"
    elif isinstance(error, (NameError, AttributeError)):
        way = "name"
    return Broken(found("runs", way, what=what, error=told(error)))
