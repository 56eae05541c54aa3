"""Arrays in compact JSON that Python and browsers can read.

A *grid* is a dict: `shape`; `planes`, the number of bytes per number; and `data`, all high bytes,
then the lower ones, packed with gzip and base64 (high bytes are kept together because they repeat
and compress well). The other keys define the meaning of the numbers; see `pack`, `pack_whole` and
`pack_float`.
"""

from __future__ import annotations

import base64
import gzip
import math
from dataclasses import dataclass
from typing import Any

import numpy as np

BYTE = 254  # the highest level of one byte; 255 stands for NaN
TWO_BYTES = 65534


def pack(values: np.ndarray, levels: int = BYTE, *, root: bool = False) -> dict[str, Any]:
    """Pack numbers ≥ 0 as integer multiples of 1/`levels` of the largest in each `values[n]`.

    With `root`, square roots are packed, which keeps more digits of small numbers. The
    code `levels + 1` stands for NaN.

    >>> grid = pack(np.array([[0.0, 0.5, 2.0, math.nan]]))
    >>> grid["shape"], grid["scale"], grid["planes"]
    ([1, 4], [2.0], 1)
    >>> unpack(grid).round(2).tolist()
    [[0.0, 0.5, 2.0, nan]]
    """
    values = np.asarray(values, dtype=np.float64)
    known = np.isfinite(values)
    filled = np.where(known, values, 0.0).clip(min=0.0)
    scale = filled.reshape(len(values), -1).max(axis=1, initial=0.0)
    share = filled / np.where(scale > 0, scale, 1.0).reshape(-1, *[1] * (values.ndim - 1))
    codes = np.rint((np.sqrt(share) if root else share) * levels)
    coding = {"levels": levels, "root": root, "scale": scale.tolist()}
    return coding | _planes(np.where(known, codes, levels + 1), 1 if levels <= BYTE else 2)


def pack_whole(values: np.ndarray) -> dict[str, Any]:
    """Pack integers ≥ −1 exactly.

    >>> unpack(pack_whole(np.array([[-1, 0, 700]]))).tolist()
    [[-1, 0, 700]]
    """
    codes = np.asarray(values) + 1
    highest = int(codes.max(initial=0))
    return _planes(codes, 1 if highest < 1 << 8 else 2 if highest < 1 << 16 else 4)


def pack_float(values: np.ndarray, planes: int) -> dict[str, Any]:
    """Pack numbers, NaN and infinities as floats of 4 or 2 bytes, with 24 or 11 bits of precision.

    Floats of 2 bytes are multiples of `unit`, a power of two chosen so that the largest fits;
    numbers below 2⁻²⁹ times the largest keep fewer bits.

    >>> grid = pack_float(np.array([[0.5, 17000.0, math.nan, math.inf]]), 2)
    >>> grid["planes"], grid["unit"]
    (2, 1.0)
    >>> unpack(grid).tolist()
    [[0.5, 16992.0, nan, inf]]
    """
    values = np.asarray(values, dtype=np.float64)
    largest = np.abs(values[np.isfinite(values)]).max(initial=0.0)
    unit = 2.0 ** (math.frexp(largest)[1] - 15) if planes == 2 else 1.0
    with np.errstate(over="ignore"):
        codes = (values / unit).astype(f">f{planes}").view(f">u{planes}")
    return {"unit": unit} | _planes(codes, planes)


def _planes(codes: np.ndarray, planes: int) -> dict[str, Any]:
    whole = np.ascontiguousarray(codes.ravel(), dtype=f">u{planes}")
    by_plane = whole.view(np.uint8).reshape(-1, planes).T
    return {"shape": list(codes.shape), "planes": planes, "data": gzip_b64(by_plane.tobytes())}


def unpack(grid: dict[str, Any]) -> np.ndarray:
    """Return the array of a grid, float32 or int64.

    Raises:
        ValueError: the bytes do not match the shape.
    """
    shape, planes = tuple(grid["shape"]), grid["planes"]
    content = ungzip_b64(grid["data"])
    if len(content) != math.prod(shape) * planes:
        raise ValueError(
            f"{len(content)} bytes do not match shape {list(shape)} with {planes} bytes each"
        )
    by_plane = np.frombuffer(content, np.uint8).reshape(planes, -1)
    codes = np.ascontiguousarray(by_plane.T).view(f">u{planes}").reshape(shape)
    if "unit" in grid:
        return (codes.view(f">f{planes}").astype(np.float64) * grid["unit"]).astype(np.float32)
    if "levels" not in grid:
        return codes.astype(np.int64) - 1
    share = codes / grid["levels"]
    scale = np.asarray(grid["scale"]).reshape(-1, *[1] * (len(shape) - 1))
    values = (share**2 if grid["root"] else share) * scale
    return np.where(codes > grid["levels"], np.nan, values).astype(np.float32)


def pooled(values: np.ndarray, most: int) -> np.ndarray:
    """Average the last axis in at most `most` blocks; entry i of T is in block `i · most // T`.

    NaN is ignored; the mean of a block that contains only NaN is NaN.

    >>> pooled(np.array([[1.0, 3.0, 5.0, math.nan]]), 2).tolist()
    [[2.0, 5.0]]
    """
    length = values.shape[-1]
    if length <= most:
        return values
    starts = np.ceil(np.arange(most) * length / most).astype(int)
    known = np.isfinite(values)
    total = np.add.reduceat(np.where(known, values, 0.0), starts, axis=-1)
    count = np.add.reduceat(known, starts, axis=-1, dtype=np.int64)
    return np.where(count > 0, total / np.maximum(count, 1), np.nan)


def gzip_b64(content: bytes) -> str:
    """Compress bytes to text: gzip, then base64. The same bytes give the same text."""
    return base64.b64encode(gzip.compress(content, 9, mtime=0)).decode("ascii")


def ungzip_b64(text: str) -> bytes:
    """Return the bytes that `gzip_b64` compressed.

    Raises:
        ValueError: the text is damaged.
    """
    try:
        return gzip.decompress(base64.b64decode(text, validate=True))
    except (OSError, EOFError, ValueError) as error:
        raise ValueError(f"packed data are damaged: {error}") from error


MAP_SIDE = 256  # the maximal number of cells on a side of a map
MAP_CELLS = 600_000  # cells of all maps together: 24 × 24 for each of 1,024 heads
TOP_ENTRIES = 600_000  # entries of all heads together: one per query for 1,024 heads on 512 tokens
MOST_KEYS = 8
SHORT_PERIOD = 14  # random tokens in the short piece that is shown, before they repeat
POSITIONS = 50_000


@dataclass(frozen=True)
class Budget:
    """The resolution of a look, chosen to keep the page for 1,024 heads below 3 MB.

    map_side: the maximal number of cells on a side of a map. top_keys: the number of keys kept for
    each query. positions: the maximal number of entries of `entropy` and `received` of a head.
    """

    map_side: int
    top_keys: int
    positions: int


def short_period(heads: int) -> int:
    """Return the length of the short repeated piece for a model with `heads` heads.

    >>> short_period(16), short_period(1024), short_period(4096)
    (14, 12, 6)
    """
    return max(2, min(SHORT_PERIOD, math.isqrt(MAP_CELLS // heads) // 2))


def budget(heads: int, tokens: int) -> Budget:
    """Return the resolution for `heads` heads (of all layers together) on `tokens` tokens.

    >>> budget(12, 128)
    Budget(map_side=128, top_keys=8, positions=128)
    >>> budget(12 * 12, 1024), budget(32 * 32, 512)
    (Budget(map_side=64, top_keys=4, positions=347), Budget(map_side=24, top_keys=1, positions=48))
    """
    most = max(2, min(MAP_SIDE, math.isqrt(MAP_CELLS // heads)))
    side = math.ceil(tokens / math.ceil(tokens / most))  # blocks of nearly equal sizes
    keys = min(MOST_KEYS, TOP_ENTRIES // (heads * tokens))
    return Budget(side, keys, max(2, min(tokens, POSITIONS // heads)))


def finite(value: Any) -> Any:
    """Replace the numbers in nested data that are not finite with None.

    >>> finite({"a": [1.5, math.inf]})
    {'a': [1.5, None]}
    """
    if isinstance(value, dict):
        return {key: finite(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
