"""Whose fault it is that a call fails, the layer's or that of a guess, and what is said of it."""

from __future__ import annotations

import contextlib
import difflib
import math
import re
import sys
import traceback
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from .call_adapter import Caller, UnusableResult
from .checked_target import BATCH, TOKENS, Target
from .errors import failing_line, is_users, users_frames
from .introspect import numbers_in
from .on_cpu import wants_gpu
from .signatures import source_of

LONGEST = 400
"""The most tokens that are tried because an error speaks of them."""
AREAS = (16, 10)
"""Tokens of the windows that a constructor gets here."""

SIDES = re.compile("window|(^|_)win($|_)|map_size|height|grid|resolution|image_size|block_size")
"""Names of what windows and maps are wide and high."""
OTHER_AXES = re.compile(
    r"values to unpack|expected \d dims|Dimension out of range|[Ee]xpected \d-?D|"
    r"number of dims|must be \d-?D|No query sequence|to have \d+ channels|"
    r"maximum size for tensor at dimension|scalar types: Long"
)
OF_INPUT = re.compile(r"desired ordering of dimensions|index out of range in self")
"""What is said of an input that should have other axes, or be whole numbers."""
_OF_SIDES = re.compile(r"multiply up|is invalid for input|divisible|[Kk]ernel size|too small")
"""What is said where a map's sides do not suit."""
_SIZES = re.compile(r"must match the size of tensor \w \((\d+)\)|size of tensor a \((\d+)\)")

_SHAPE = re.compile(r"shape '\[([-\d, ]*)\]' is invalid for input")


def axis_too_many(error: BaseException) -> bool:
    """Whether a result has an axis of 1 that x lacks: x, then, may lack one too."""
    return re.search(r"shape \[\d+, (\d+, 1|1, \d+), \d+\]", str(error)) is not None


def sizes_in(error: BaseException) -> list[int]:
    """The sizes of two tensors that an error says do not fit each other, or into which one does not
    go."""
    shape = _SHAPE.search(str(error))
    into = re.findall(r"\d+", shape[1]) if shape else ()
    return [int(n) for pair in (*_SIZES.findall(str(error)), into) for n in pair if n]


def known_sizes(subject: Target) -> set[int]:
    """The sizes that its tensors may have by right, whatever number of tokens it insists on."""
    known = [BATCH, TOKENS, subject.embed_dim, subject.num_heads, subject.head_dim, 1, 0]
    wide = {a * b * c for a in known for b in (1, 2, 3) for c in known if a and c}
    return {*wide, subject.context_length or 0} - {TOKENS**2, *areas_of(subject)}


def areas_of(subject: Target) -> list[int]:
    """How many tokens the windows and maps have that it speaks of, or was given here."""
    return [*dict.fromkeys([*own_areas(subject), *AREAS * ("window" in subject.roles)])]


def own_areas(subject: Target) -> list[int]:
    """How many tokens the windows and maps have that it speaks of."""
    if subject.module is None:
        return []
    squares = [int(side) ** 2 for side in numbers_in(subject.module, SIDES.pattern)]
    sides = (value for name, value in subject.settings.items() if SIDES.search(name.lower()))
    squares += [side**2 for side in sides if type(side) is int]
    held = (pair for one in subject.module.modules() for pair in vars(one).items())
    several = [value for name, value in held if SIDES.search(name) and _is_sides(value)]
    areas = [*squares, *map(math.prod, several)]
    tables = (one for one in subject.module.buffers() if one.ndim == 2 and _of_pairs(one))
    return [*(area for area in areas if 1 < area <= LONGEST), *map(len, tables)]


def _is_sides(value: Any) -> bool:
    """Whether it holds two or three whole numbers."""
    several = isinstance(value, tuple | list) and len(value) in (2, 3)
    return several and all(isinstance(one, int) and one > 1 for one in value)


def of_maps(subject: Target) -> bool:
    """Whether it holds weights for maps: of convolutions over rows and columns, or one number for
    each channel, `[1, E, 1, 1]`."""
    weights = subject.module.parameters() if subject.module is not None else ()
    return any(one.ndim == 4 for one in weights)


def _of_pairs(table: Tensor) -> bool:
    """Whether it has a place for each two tokens of a square window."""
    tokens, others = table.shape
    whole = "int" in str(table.dtype)
    return (
        whole and tokens == others and 1 < tokens <= LONGEST and math.isqrt(tokens) ** 2 == tokens
    )


def of_guess(subject: Target, error: BaseException) -> bool:
    """Whether an error speaks of what was guessed: the axes of x, numbers in the place of tokens, a
    size that is none of ours, an argument that was left out; or comes from a library, of whose
    layer x alone is no call; or the layer itself refuses."""
    if isinstance(error, UnusableResult):
        return False
    frames = users_frames(error)
    if not frames or OTHER_AXES.search(str(error)) or refuses(error):
        return True
    if is_no_tensor(subject.caller, error) or _of_input(subject.caller, error):
        return True
    if "H" in subject.caller.layout.axes and _OF_SIDES.search(str(error)):
        return True
    sizes, shape = set(sizes_in(error)), _SHAPE.search(str(error))
    each = shape is not None and shape[1].split(",")[0] in ("-1", str(BATCH))  # of any batch
    if (TOKENS in sizes or each) and sizes - known_sizes(subject):
        return True
    return bool(spoken(subject.caller, error))


def is_no_tensor(caller: Caller, error: BaseException) -> bool:
    """Whether an input is asked for what no tensor has, nor anything that is spelled alike: it
    stands for something else then, as a layer does that is handed to its processor."""
    name, owner = getattr(error, "name", None), getattr(error, "obj", None)
    if not isinstance(error, AttributeError) or not isinstance(owner, Tensor) or not name:
        return False
    line = failing_line(error)
    asks = any(re.search(rf"\b{one}\.{name}\b", line) for one in caller.inputs)
    return asks and not difflib.get_close_matches(name, dir(Tensor), cutoff=0.75)


def _of_input(caller: Caller, error: BaseException) -> bool:
    """Whether a line fails on an input itself for the number of its axes, or for numbers that are
    no tokens of a vocabulary."""
    words = set(re.findall(r"\w+", failing_line(error)))
    return OF_INPUT.search(str(error)) is not None and bool(words & {*caller.inputs})


class _Softmaxes(TorchFunctionMode):
    """Notes whether a softmax came to its end."""

    done = False

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self.done |= getattr(func, "__name__", "") in ("softmax", "scaled_dot_product_attention")
        return result


def fails_after_softmax(subject: Target, error: BaseException) -> bool:
    """Whether a call that is set fails in somebody's file on what the layer itself made of x: its
    attention was computed, and nothing that was left out is spoken of."""
    handed = (TypeError, AttributeError, LookupError)  # which what the constructor got may bring
    if isinstance(error, (UnusableResult, *handed)) or refuses(error):
        return False
    if spoken(subject.caller, error):
        return False
    if subject.caller.custom is not None or not users_frames(error):
        return False
    with contextlib.suppress(Exception), _Softmaxes() as seen:
        subject(subject.input())
    return seen.done


def is_miscalled(subject: Target, error: BaseException) -> bool:
    """Whether a line of the target's own file calls a layer of PyTorch's, or something of a file of
    the same author's, with arguments that it does not take or without some that it wants."""
    if "must derive from BaseException" in str(error):  # raised where it should be returned
        return True
    said = re.match(r"(\w+)[\w.]*\(\) (got an unexpected|missing|takes)", str(error))
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    users = [frame for frame in frames if is_users(frame.f_code.co_filename)]
    if not isinstance(error, TypeError) or said is None or not users or subject.made_up:
        return False
    file, known = users[-1].f_code.co_filename, users[-1].f_globals
    home = sys.modules.get(getattr(known.get(said[1]), "__module__", ""))
    own = home is not None and is_users(getattr(home, "__file__", None) or "")
    called = frames[-1].f_code.co_filename in (file, nn.Module.__call__.__code__.co_filename)
    return called and (own or hasattr(nn, said[1]))


def spoken(caller: Caller, error: BaseException) -> list[str]:
    """The arguments that were left out and that the failing line of somebody's file speaks of."""
    every = traceback.extract_tb(error.__traceback__)
    frames = users_frames(error) or [f for f in every if "/torch/" not in f.filename]
    words = set(re.findall(r"\w+", frames[-1].line or "")) if frames else set[str]()
    left = [n for n in caller.parameters if not caller.required(n) and n not in caller.inputs]
    return [name for name in left if name in words]


def set_by(error: BaseException) -> list[str]:
    """The methods of a module that set the attribute which it lacks, other than its constructor and
    its `forward`."""
    owner, name = getattr(error, "obj", None), getattr(error, "name", None)
    if not isinstance(error, AttributeError) or not isinstance(owner, nn.Module) or not name:
        return []
    sets = re.compile(rf"\bself\.{name}\b[^=()\n]*=(?!=)")
    methods = {n: one for n, one in vars(type(owner)).items() if n not in ("__init__", "forward")}
    return [method for method, one in methods.items() if sets.search(source_of(one))]


def refuses(error: BaseException) -> bool:
    """Whether an error is raised on purpose: by a `raise` or an `assert`, or for a package that is
    not there."""
    frames = traceback.extract_tb(error.__traceback__)
    line = frames[-1].line or "" if frames else ""
    if isinstance(getattr(error, "obj", None), nn.Module):  # which raises it for its attributes
        return False
    return isinstance(error, ImportError) or line.startswith(("raise ", "assert "))


def pools(caller: Caller, error: BaseException | None) -> bool:
    """Whether a result had no axis of tokens."""
    shape = error.shape if isinstance(error, UnusableResult) else []
    return caller.pools(shape, (BATCH, TOKENS))


def wants_kernel(error: BaseException) -> bool:
    """Whether a call fails for a kernel that only a GPU runs, where there is none."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.line or "" for frame in users_frames(error)]
    asks = lines and re.search(r"torch\.cuda\.(device|stream|synchronize)\(", lines[-1])
    return not torch.cuda.is_available() and bool(
        asks or wants_gpu(error) or any("/triton/" in frame.filename for frame in frames)
    )
