"""Whether a call fails whatever it is given: tried with values of which nothing is known.

An unknown value goes through every operation and makes unknown ones; where the code asks it a
question, both answers are tried. An error that comes in spite of that, at a line that holds none,
is no guess's fault.
"""

from __future__ import annotations

import dis
import linecache
import re
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import takewhile
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from .call_faults import is_no_tensor, of_guess, refuses
from .checked_target import Target
from .errors import is_users, users_frames
from .fills import Fill, left_out
from .layouts import SINGLE
from .signatures import signature

ANSWERS, RUNS, SECONDS = 24, 64, 1.0
"""How many questions a call may ask of unknown values, how many ways of answering are tried, and
for how long."""
PLAIN = {"tokens", "batch", "training", "causal", "use_cache", "weights", "dropout", "start"}
"""Roles of numbers and flags, which stay what they are."""
NUMBER = 1.5
"""What an unknown number is where Python's own functions want one, as `math.sqrt` does."""
SOME = 3
"""How often a loop runs that goes on for an unknown number of times."""
CERTAIN = "whatever it is"
"""The note on an error that no value of the unknown ones avoids."""
STEADY = (TypeError, AttributeError, KeyError, IndexError, UnboundLocalError)
"""Errors that no other number would avoid."""
OPEN = re.compile("Unknown|dtype|number of dimensions|maximum size for tensor")
"""What errors say of unknown values, and of axes that x may have as well."""
WIDE = re.compile(r"normalized_shape=\[(\d+)\]|and (\d+)x\d+\)")
"""How errors speak of the features that a layer takes."""
MISCALLED = re.compile(
    r"\(\) (got (an unexpected keyword|multiple values)|missing \d+ required|takes \d+ positional)"
)
"""What Python says of arguments that a function has not, whatever they are."""


class Undecided(Exception):
    """What comes next depends on something that is not known."""


class Unknown:
    """A number, a shape, or anything else of which nothing is known."""

    def __init__(self, asked: _Answers) -> None:
        self.__dict__["asked"] = asked

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return _made(func, self.asked)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Unknown(self.asked)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return Unknown(self.asked)

    def __getitem__(self, key: Any) -> Any:
        return Unknown(self.asked)

    def __iter__(self) -> Iterator[Any]:
        return iter([Unknown(self.asked) for _ in range(_wanted(sys._getframe(1)))])

    def __bool__(self) -> bool:
        return self.asked.next()

    def __float__(self) -> float:
        return NUMBER

    def __len__(self) -> int:
        raise Undecided

    __int__ = __index__ = __len__

    def __hash__(self) -> int:
        return id(self)


def _operation(self: Unknown, *others: Any) -> Any:
    inside = [one for one in others if isinstance(one, Tensor)]
    return UnknownTensor.of(self.asked) if inside else Unknown(self.asked)


for _name in "add sub mul truediv floordiv mod pow and or xor matmul".split():
    setattr(Unknown, f"__{_name}__", _operation)
    setattr(Unknown, f"__r{_name}__", _operation)
for _name in "neg pos abs invert lt le gt ge eq ne".split():
    setattr(Unknown, f"__{_name}__", _operation)


class UnknownNumber(int):
    """A whole number of which nothing is known; what is handed to PyTorch must be one."""

    asked: _Answers

    @classmethod
    def of(cls, asked: _Answers) -> UnknownNumber:
        made = cls(SOME)
        made.asked = asked
        return made

    def __truediv__(self, other: Any) -> Any:
        return Unknown(self.asked)

    __rtruediv__ = __pow__ = __rpow__ = __truediv__  # type: ignore[assignment]

    def __bool__(self) -> bool:
        return self.asked.next()

    def __int__(self) -> int:
        raise Undecided

    def __float__(self) -> float:
        return NUMBER

    def __hash__(self) -> int:
        return id(self)


def _whole(self: UnknownNumber, *others: Any) -> Any:
    if all(isinstance(one, int) for one in others):
        return UnknownNumber.of(self.asked)
    return NotImplemented


for _name in "add sub mul floordiv mod".split():
    setattr(UnknownNumber, f"__{_name}__", _whole)
    setattr(UnknownNumber, f"__r{_name}__", _whole)
for _name in "lt le gt ge eq ne".split():
    setattr(UnknownNumber, f"__{_name}__", _operation)
for _name in "neg pos abs".split():
    setattr(UnknownNumber, f"__{_name}__", _whole)


class UnknownShape(Unknown):
    """As many unknown numbers as are wanted."""

    def __getitem__(self, key: Any) -> Any:
        kind = UnknownShape if isinstance(key, slice) else UnknownNumber.of
        return kind(self.asked)

    def __iter__(self) -> Iterator[Any]:
        return iter([UnknownNumber.of(self.asked) for _ in range(_wanted(sys._getframe(1)))])


class UnknownTensor(Tensor):
    """A tensor of which nothing is known, not even its axes."""

    asked: _Answers
    sure: bool
    """Whether it is a tensor whatever was given: a function of PyTorch's made it."""

    @classmethod
    def of(cls, asked: _Answers, sure: bool = True) -> UnknownTensor:
        made = torch.Tensor._make_subclass(cls, torch.empty(0))  # type: ignore[attr-defined]
        made.asked, made.sure = asked, sure
        return made

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        first = next(one for one in _unknowns([args, kwargs]))
        return _made(func, first.asked, args)

    def __iter__(self) -> Iterator[Any]:
        return iter([Unknown(self.asked) for _ in range(_wanted(sys._getframe(1)))])

    def __len__(self) -> int:
        raise Undecided

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in ("asked", "sure"):
            raise AttributeError(name)
        if self.sure:
            raise _certain(AttributeError(f"'Tensor' object has no attribute '{name}'"))
        return Unknown(self.asked)


class _Answers:
    """The answers to what is asked of unknown values, in order; yes to what is new."""

    def __init__(self, said: list[bool]) -> None:
        self.said, self.place = said, 0

    def next(self) -> bool:
        if self.place == len(self.said):
            self.said.append(True)
        if self.place >= ANSWERS:
            raise Undecided
        self.place += 1
        return self.said[self.place - 1]


class _Spreading(TorchFunctionMode):
    """Lets functions of PyTorch make unknown values of such."""

    def __init__(self, asked: _Answers) -> None:
        super().__init__()
        self.asked = asked

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if any(True for _ in _unknowns([args, kwargs or {}])):
            return _made(func, self.asked, args)
        return func(*args, **kwargs or {})


def _unknowns(values: Any) -> Iterator[Any]:
    """The unknown values among arguments."""
    if isinstance(values, Unknown | UnknownNumber | UnknownTensor):
        yield values
    elif isinstance(values, list | tuple):
        for one in values:
            yield from _unknowns(one)
    elif isinstance(values, Mapping):
        yield from _unknowns([*values.values()])
    elif isinstance(values, slice):
        yield from _unknowns([values.start, values.stop, values.step])


_OTHER = re.compile(
    r"^(item|tolist|chunk|split|unbind|tensor_split|max|min|topk|sort|dtype|stride|is_\w+|equal|"
    r"allclose|unique|nonzero|multi_head_attention_forward|any|all|__(eq|contains)__)$"
)
"""What gives no tensor, or several, or one that is asked something."""


def _made(func: Callable[..., Any], asked: _Answers, args: Any = ()) -> Any:
    """What a function of PyTorch makes of unknown values."""
    name = getattr(func, "__name__", "")
    if name == "__get__":
        name = getattr(func, "__self__", func).__name__
    if name in ("device", "ndim", "dim", "numel", "shape", "size"):
        made = UnknownShape if name == "shape" or len(args) < 2 else UnknownNumber.of
        made = UnknownNumber.of if name in ("ndim", "dim", "numel") else made
        return torch.device("cpu") if name == "device" else made(asked)
    if name == "__bool__":
        return asked.next()
    if name in ("__len__", "__index__", "__int__"):
        raise Undecided
    if name == "__float__":
        return NUMBER
    if name == "einsum" and args and isinstance(args[0], str):
        _sum_of(args[0])
    if name == "chunk" and len(args) > 1 and type(args[1]) is int:
        return tuple(UnknownTensor.of(asked) for _ in range(args[1]))
    return Unknown(asked) if _OTHER.match(name) else UnknownTensor.of(asked)


def _sum_of(equation: str) -> None:
    """See whether `einsum` takes an equation at all."""
    sides = equation.replace(" ", "").partition("->")[0].split(",")
    if "." not in equation:
        with torch._C.DisableTorchFunction():
            try:
                torch.einsum(equation, *(torch.zeros([1] * len(side)) for side in sides))
            except RuntimeError as error:
                raise _certain(error) from None


def _certain(error: Exception) -> Exception:
    """An error that comes whatever the unknown value is."""
    error.add_note(CERTAIN)
    return error


def _is_noted(error: BaseException) -> bool:
    return CERTAIN in getattr(error, "__notes__", ())


def _wanted(frame: FrameType) -> int:
    """How many values a line unpacks: `b, t, e = x.shape`; one where they go into a call."""
    operation, count = frame.f_code.co_code[frame.f_lasti : frame.f_lasti + 2]
    name = dis.opname[operation]
    if name == "UNPACK_SEQUENCE":
        return count
    if name == "LIST_EXTEND":
        return 1
    raise Undecided


def fails_anyway(subject: Target) -> BaseException | None:
    """The error with which every call ends that is not refused, whatever is given for what was made
    up; None where there is none, or where that cannot be known."""
    caller = subject.caller
    if caller.custom is not None or not caller.inputs or subject.module is None:
        return None
    asked = [n for n in (*caller.made_up, *caller.tables) if caller.roles[n] not in PLAIN]
    every = [n for n in caller.parameters if n not in caller.inputs and n not in caller.extra]
    open_ = [n for n in every if caller.fill(n) is left_out and caller.parameters[n].kind <= 3]
    unset = [n for n in open_ if caller.parameters[n].default is None]
    for inputs in (True, False):  # what says more comes first
        errors = [_always(subject, names, inputs) for names in (asked, [*asked, *unset])]
        if (error := errors[0]) is not None and all(errors):
            if is_no_tensor(caller, error):
                return None
            shapes = isinstance(error, RuntimeError) and not is_certain(error)
            alone = shapes and _goes_on_alone(subject, asked, error)
            return None if alone else error
    return None


def _goes_on_alone(subject: Target, names: list[str], error: BaseException) -> bool:
    """Whether one sequence without a batch, `[T, E]`, gets past the line that fails."""
    caller = subject.caller
    if caller.layout is SINGLE:
        return False
    fills = dict.fromkeys(names, lambda _: UnknownTensor.of(_Answers([]), sure=False))
    caller = replace(caller, layout=SINGLE, fills={**caller.fills, **fills})
    x = subject.input()[0]
    try:
        with torch.no_grad(), _Spreading(_Answers([])):
            caller.feed((x, x, x), False)
    except Exception as other:
        (file, line), (there, later) = _line_of(error), _line_of(other)
        return file == there and later > line
    return True


def _line_of(error: BaseException) -> tuple[str, int]:
    """The file and the line of somebody's that an error came from."""
    frames = users_frames(error)
    return (frames[-1].filename, frames[-1].lineno or 0) if frames else ("", 0)


def is_certain(error: BaseException) -> bool:
    """Whether no number and no value would avoid an error: a name, an argument or a method that is
    not there."""
    miscalled = isinstance(error, TypeError) and MISCALLED.search(str(error)) is not None
    return _is_noted(error) or miscalled or isinstance(error, NameError)


def _always(subject: Target, names: list[str], inputs: bool) -> BaseException | None:
    """The error of every call with unknown values for some arguments, perhaps for x, too."""
    said: list[bool] = []
    first: BaseException | None = None
    until = time.thread_time() + SECONDS
    for _ in takewhile(lambda _: time.thread_time() < until, range(RUNS)):
        answers = _Answers(said)

        def unknown(place: Any, answers: _Answers = answers) -> Any:
            return UnknownTensor.of(answers, sure=False)

        fills: dict[str, Fill] = {**subject.caller.fills, **dict.fromkeys(names, unknown)}
        caller = replace(subject.caller, fills=fills)
        x = subject.input()
        x = x[0] if caller.layout is SINGLE else caller.layout.into(x)
        given = unknown(None) if inputs else x
        try:
            with torch.no_grad(), _Spreading(answers):
                caller.feed((given, given, given), False)
            return None
        except Undecided:
            return None
        except Exception as error:
            del said[answers.place :]
            noted = _is_noted(error)
            if noted or not refuses(error):
                if not noted and not _is_sure(subject, error):
                    return None
                first = first or error
        while said and not said[-1]:
            said.pop()
        if not said:
            return first
        said[-1] = False
    return None


def _is_sure(subject: Target, error: BaseException) -> bool:
    """Whether an error has nothing to do with what is not known."""
    text = str(error)
    if OPEN.search(text) or of_guess(subject, error) or _of_another_width(subject, text):
        return False
    if is_certain(error) and "positional" not in text:
        return True
    return not any(True for _ in _unknowns([*_at_failing(error)]))


def is_apart(error: BaseException | None, made_up: Iterable[Any]) -> bool:
    """Whether an error that no number avoids comes from a line that holds nothing which was made
    up."""
    if not isinstance(error, STEADY) or refuses(error):
        return False
    held = [*_at_failing(error)]
    return bool(held) and not any(one is two for one in held for two in made_up)


def _at_failing(error: BaseException) -> Iterator[Any]:
    """What the names stand for in the part of a line of somebody's file that failed."""
    frames = [one for one, _ in traceback.walk_tb(error.__traceback__)]
    own = [n for n, one in enumerate(frames) if is_users(one.f_code.co_filename)]
    if own:
        code = _failing(traceback.extract_tb(error.__traceback__)[own[-1]])
        for name in re.findall(r"[A-Za-z_][\w.]*", code):
            yield _value(name.split("."), frames[own[-1]].f_locals)


def _of_another_width(subject: Target, text: str) -> bool:
    """Whether a layer takes as many features as a default of the constructor says, and x has
    others."""
    said = WIDE.search(text)
    defaults = {one.default for one in signature(type(subject.module)) if type(one.default) is int}
    return said is not None and int(said[1] or said[2]) in defaults - {subject.embed_dim}


def _value(path: list[str], known: Mapping[str, Any]) -> Any:
    """What a dotted name stands for, as far as it goes."""
    value = known.get(path[0])
    for name in path[1:]:
        if isinstance(value, Unknown | UnknownTensor):
            return value
        value = getattr(value, name, None)
    return value


def _failing(place: traceback.FrameSummary) -> str:
    """The part of a line that failed: `torch.sqrt(self.wide)`."""
    lines = linecache.getlines(place.filename)[(place.lineno or 1) - 1 : place.end_lineno]
    text, start, end = "".join(lines).encode(), place.colno, place.end_colno
    if start is None or end is None:
        return text.decode()
    return text[start : len(text) - len(lines[-1].encode()) + end].decode()
