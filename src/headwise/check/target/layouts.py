"""The order of the axes in which a call takes x, and what the code says of it."""

from __future__ import annotations

import ast
import contextlib
import math
import re
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from torch import Tensor, nn

from .names import calling_role
from .signatures import signature, source_of


@dataclass(frozen=True)
class Layout:
    """With which axes a call takes x: "BTE" in any order, perhaps with axes of 1, or with the
    tokens in rows and columns, "H" and "W", as nearly square as their number allows."""

    axes: str

    def __str__(self) -> str:
        return f"[{', '.join(self.axes)}]"

    def into(self, x: Tensor) -> Tensor:
        """x as the call takes it."""
        if "H" in self.axes:
            count = x.shape[1]
            height = max(n for n in range(1, math.isqrt(count) + 1) if count % n == 0)
            x = x.unflatten(1, (height, -1))
        turned = x.permute(*(self._usual.index(axis) for axis in self.axes if axis != "1"))
        turned = turned if self.axes == "BTE" else turned.contiguous()
        for place in self._extra:
            turned = turned.unsqueeze(place)
        return turned

    def back(self, y: Tensor) -> Tensor:
        """What comes out, `[B, T, E]` again."""
        own, axes = y.squeeze(self._extra), self.axes.replace("1", "")
        if own.ndim != len(axes):
            return own
        turned = own.permute(*(axes.index(axis) for axis in self._usual))
        return turned.flatten(1, 2) if "H" in axes else turned

    @property
    def _usual(self) -> str:
        return "BHWE" if "H" in self.axes else "BTE"

    @property
    def _extra(self) -> tuple[int, ...]:
        """Where axes of 1 stand."""
        return tuple(place for place, axis in enumerate(self.axes) if axis == "1")


USUAL, TIME_FIRST, SINGLE = Layout("BTE"), Layout("TBE"), Layout("TE")
"""The usual layout; PyTorch's own without `batch_first`; and one sequence at a time."""
LAYOUTS = (USUAL, TIME_FIRST, *map(Layout, "B1TE BT1E 1TBE T1BE 1BTE TB1E BET BET1 BE1T".split()))
"""How x may go in, the likeliest first."""
MAPS = Layout("BEHW"), Layout("BHWE")
"""How it may go in where one number of tokens is insisted on."""

AXES = {
    "B": r"b_?|n|bs|bsz|bsize|batch|batch_?size|n_?batch(es)?|num_batch(es)?",
    "T": r"t|l|s|n|seq|len|seq_?len(gth)?|length|num_?tokens|n_?tokens|tokens|time|timesteps|"
    r"sequence|(n_?|num_)?nodes|num_vert(ex|ices)|(n_|num_)patches|posn|(query|q)_len",
    "E": r"c|d|e|f|ch|chan|channels?|dim|d_?model|n_embd|embed_?dim|hidden(_size|_dim)?|"
    r"n_?channels|in_channels|num_channels|features|emb(_size)?",
    "H": r"h|height|rows",
    "W": r"w|width|columns|cols",
    "1": r"d|depth|t|f|frames|num_frames|z|slices",
}
"""What people call each axis, in lower case; 1 is that of a volume's or a video's depth."""
SAID = USUAL, TIME_FIRST, Layout("BET"), *MAPS, *map(Layout, "BE1HW BEHW1 B1HWE BHW1E".split())
"""Layouts that the names of axes may tell; the usual one first, which most names fit."""
WINDOWED = Layout("B11HWE")
"""That of windows in a grid, which no other has as many axes as."""


def said_layout(target: Any, name: str) -> Layout | None:
    """The axes of an input as its code names them: from `b, c, h, w = x.shape` or
    `rearrange(x, "b c h w -> …")`, else from what is written about it, `x: [B, C, H, W]`, or of
    what is made of it.

    >>> class Layer(nn.Module):
    ...     def forward(self, x): ...
    >>> said_layout(Layer(), "x")
    """
    made = getattr(type(target), "forward", None)
    code = _plain(source_of(made)) if isinstance(target, nn.Module) else ""
    unpacked = r"^[ \t#]*\(?([\w, ]+)\)? = {}\.(?:shape|size\(\))[ \t]*(?:#|$)"
    for said in re.findall(unpacked.format(name), code, re.MULTILINE):
        if (layout := _of_words(re.findall(r"\w+", said.lower()))) is not None:
            return layout
    for said in re.findall(rf"rearrange\(\s*{name}, ?(?:pattern=)?[\"']([\w ()]+?) ?->", code):
        if (layout := _of_words(_arranged(said.lower()))) is not None:
            return layout
    for said in written_axes(target, name):
        if (layout := _of_words(said)) is not None and layout is not USUAL:
            return layout
    others = "|".join(["self", *(one.name for one in signature(made))]) if made else "self"
    for said in re.findall(unpacked.format(rf"(?!(?:{others})\b|\w*mask)\w+"), code, re.MULTILINE):
        layout = _of_words(re.findall(r"\w+", said.lower()))
        if layout is not None and "H" in layout.axes:  # as nothing but a map is cut
            return layout
    return None


def batch_axis(target: Any, name: str) -> int | None:
    """Which axis of an input as it comes in its code takes for that of sequences, by a name that
    nothing else has, or by what is written of it: 1 for `batch_size = x.size(1)`; None where it
    does not say.

    >>> class Layer(nn.Module):
    ...     def forward(self, x): ...
    >>> batch_axis(Layer(), "x")
    """
    made = getattr(type(target), "forward", None)
    code = source_of(made) if isinstance(target, nn.Module) else ""
    again = rf"^[ \t]*(?:\w+, )*{name}(?:, \w+)* = "  # another tensor from there on
    code, *_ = re.split(again, code, maxsplit=1, flags=re.MULTILINE)
    batch, shape = r"(?:[bB]|bsz?|batch(?:_?size)?)", rf"{name}\.(?:shape|size\(\))"
    end = r"[ \t]*(?:#|$)"
    for axis in (0, 1):
        alone = rf"{batch} = (?:{name}\.size\({axis}\)|{name}\.shape\[{axis}\]|{shape}\[{axis}\])"
        several = rf"{'[A-Za-z_]+, ' * axis}{batch}(?:, \w+)+ = {shape}"
        if re.search(rf"^[ \t]*(?:{alone}|{several}){end}", code, re.MULTILINE):
            return axis
    said = [one for word in (name, "input", "inputs") for one in written_axes(target, word)]
    said = said or [*_from_to(target)]
    batches = [[place for place in (0, 1) if re.fullmatch(AXES["B"], one[place])] for one in said]
    plain = {len(one) for one in said} == {3} and all(one == batches[0] for one in batches)
    return batches[0][0] if plain and len(batches[0]) == 1 else None


def written_axes(target: Any, name: str) -> Iterator[list[str]]:
    """The axes of an argument, in words, as docstrings, comments and annotations give them:
    `x: [batch, seq_len, dim]`, `Float[Tensor, "b t d"]`."""
    if not isinstance(target, nn.Module):
        return
    made = getattr(type(target), "forward", None)
    lines = source_of(made).splitlines()
    head, *_ = source_of(type(target)).partition("def ")
    comments = [line.partition("#")[2] for line in (*head.splitlines(), *lines) if "#" in line]
    texts = [getattr(made, "__doc__", ""), type(target).__doc__, *comments]
    kind = r"(?: *\([\w.]*[Tt]ensor[^)]*\))?"
    axes = r"[\[(]((?: *(?:[A-Za-z_]\w*|\.{3}) *,)+ *[A-Za-z_]\w* *|b \w{1,2} \w{1,2}(?: \w)?)[\])]"
    said = rf"(?<![\w.]){name}\b{kind}[^\[(\n]{{0,60}}{axes}"
    listed = rf"(?<![\w.]){name} *: *((?:[A-Za-z]\w* *, *){{2,}}[A-Za-z]\w*) *$"
    for text, pattern in product(texts, (said, listed)):
        for one in re.finditer(pattern, text or "", re.MULTILINE):
            line, *_ = one.string[one.end() :].split("\n", 1)
            others = re.findall(axes, line) if pattern == said else ()  # `[B, N] or [B, N, N]`
            yield from (re.findall(r"\w+", words.lower()) for words in (one[1], *others))
    typed = rf"\b{name}: *\w+\[[\w.]+, *[\"']([\w .]+)[\"']\]"
    for axes in re.findall(typed, "\n".join(lines)):
        yield re.findall(r"\w+", axes.lower())


def _from_to(target: Any) -> Iterator[list[str]]:
    """The axes that go in, where a docstring says what becomes of them: `(batch, seq, dim) ->
    (batch, seq, dim)`."""
    kind = type(target) if isinstance(target, nn.Module) else nn.Module
    for text in (kind.__doc__, getattr(kind.forward, "__doc__", "")):
        for one in re.finditer(r"[\[(]((?: *\w+ *,){2} *\w+ *)[\])] *(?:->|→)", text or ""):
            yield re.findall(r"\w+", one[1].lower())


def _arranged(pattern: str) -> list[str]:
    """The axes of the left side of a pattern of einops, of which some may be taken apart: those of
    four axes are the rows and columns of windows, of three the tokens and the features.

    >>> _arranged("b (w1 p1) (w2 p2) c"), _arranged("b (h w) (c k)")
    (['b', 'h', 'w', 'c'], ['b', 't', 'c'])
    """
    words = re.findall(r"\([^)]*\)|\w+", pattern)
    apart = [place for place, word in enumerate(words) if word.startswith("(")]
    names = "hw" if len(words) == 4 and len(apart) == 2 else "tc"[: len(apart)]
    if len(words) == 4 and len(apart) != 2:
        return words
    for place, name in zip(apart, names, strict=False):
        words[place] = name
    return words


def _plain(code: str) -> str:
    """Code in which `b, n, d, h = *x.shape, self.heads` stands as `b, n, d = x.shape`."""

    def plain(found: re.Match[str]) -> str:
        start, names, tensor, beside = found.groups()
        kept = re.findall(r"\w+", names)[: -beside.count(",") or None]
        return f"{start}{', '.join(kept)} = {tensor}.shape"

    starred = r"^([ \t]*)((?:\w+, )+\w+) = \* ?(?:\\\n\s*)?(\w+)\.shape((?:, [\w.]+)*)[ \t]*$"
    return re.sub(starred, plain, code, flags=re.MULTILINE)


def _of_words(words: Sequence[str]) -> Layout | None:
    """The layout whose axes people call so."""
    if len(words) == len(WINDOWED.axes) and re.fullmatch(AXES["B"], words[0]):
        return WINDOWED
    fits = (one for one in SAID if len(one.axes) == len(words))
    return next((one for one in fits if _are_called(one.axes, words)), None)


def listed(target: Any, name: str) -> list[str]:
    """The roles of what an input holds where its code takes it for a list of queries, keys and
    values, whatever else is handed in: `q, k, v = inputs` or `q = inputs[0]` that stands under no
    condition; nothing where it does not.

    >>> class Layer(nn.Module):
    ...     def forward(self, inputs): ...
    >>> listed(Layer(), "inputs")
    []
    """
    made = getattr(type(target), "forward", None)
    code = textwrap.dedent(source_of(made) if isinstance(target, nn.Module) else "")
    with contextlib.suppress(SyntaxError):
        for function in ast.parse(code).body:
            roles = [calling_role(one) or "" for one in _held(function, name)]
            if set(roles) in ({"query", "key"}, {"query", "key", "value"}):
                return roles
    return []


def _held(function: ast.stmt, name: str) -> list[str]:
    """The names that a function's own lines, in no block, give to what an input holds before it is
    something else."""
    single, given = dict[int, str](), list[tuple[ast.expr, ast.expr]]()
    for one in getattr(function, "body", ()):
        match one:
            case ast.Assign([ast.Tuple(names)], ast.Name(read)) if read == name:
                return [one.id for one in names if isinstance(one, ast.Name)]
            case ast.Assign([ast.Tuple(names)], ast.Tuple(values)):
                given += zip(names, values, strict=False)
            case ast.Assign([ast.Name(made)], _) if made == name:
                break
            case ast.Assign([target], value):
                given.append((target, value))
            case _:
                pass
    for pair in given:
        match pair:
            case ast.Name(held), ast.Subscript(ast.Name(read), ast.Constant(int(place))):
                single |= {place: held} if read == name else {}
            case _:
                pass
    return [held for _, held in sorted(single.items())]


def _are_called(axes: str, words: Sequence[str]) -> bool:
    """Whether people call axes so; anything that is not used goes under `_`, and beside height and
    width the features under anything."""
    free = "E" * ("H" in axes)
    pairs = zip(axes, words, strict=True)
    return all(w == "_" or a in free or re.fullmatch(AXES[a], w) is not None for a, w in pairs)
