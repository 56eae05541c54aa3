"""Rotary positions (RoPE): both pairings of the features, and the scalings that configs name.

Su et al. 2021, "RoFormer". Pair i of a head's features is turned by the angle `position * f_i`,
`f_i = base ** (-2i / dim)`, so that a score q·k depends on the distance of the two positions only.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..core.numbers import real, whole

_NEEDS = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
    "llama3": (
        "factor",
        "original_max_position_embeddings",
        "low_freq_factor",
        "high_freq_factor",
    ),
}
"""Which keys each `rope_type` must have."""


class RoPE:
    """Rotary positions as a value: it holds no parameters and one may serve every layer.

    Args:
        dim: how many leading features of a head are rotated (even); the rest pass unchanged.
        base: the longest wavelength is near `2π * base` tokens (`rope_theta` in configs).
        interleaved: which features form a pair. False: i and i + dim/2 (Hugging Face's Llama);
            True: 2i and 2i + 1 (the paper, and Meta's own weights).
        scaling: None, or a mapping with the keys of Hugging Face configs: `rope_type` (or the
            older `type`) one of default, linear, dynamic (NTK-aware, Peng et al. 2023 §3.3),
            yarn (ibid. §3.4, with its attention factor) and llama3, with `factor`,
            `original_max_position_embeddings`, and for yarn optionally `attention_factor`,
            `mscale`, `mscale_all_dim`, `beta_fast`, `beta_slow`, `truncate`.

    Angles are computed in float64, and features rotated in float32 at least. `transformers`
    computes them in float32: its angles differ by rounding, up to about `position * 1e-7` radians.

    Raises:
        ValueError: an odd or non-positive `dim`, a base not above 0, a scaling that is not known
            or lacks a key.

    >>> import torch
    >>> rope = RoPE(2)
    >>> x = torch.tensor([1.0, 0.0]).expand(1, 1, 3, 2)  # the same vector at positions 0, 1, 2
    >>> rope(x)[0, 0, :, 0].allclose(torch.arange(3.0).cos())
    True
    >>> rope(x[:, :, :1], offset=2)[0, 0, 0].tolist() == rope(x)[0, 0, 2].tolist()
    True
    """

    def __init__(
        self,
        dim: int,
        base: float | int = 10000.0,
        interleaved: bool = False,
        scaling: Mapping[str, Any] | None = None,
    ) -> None:
        call = f"RoPE(dim={dim}, base={base}, interleaved={interleaved}, scaling={scaling})"
        if (whole(dim) or 0) < 2 or dim % 2:
            raise ValueError(f"{call}: dim must be even and at least 2: features turn in pairs")
        if not (real(base) or 0.0) > 0:
            raise ValueError(f"{call}: base must be above 0")
        self.dim = dim
        self.base = float(base)
        self.interleaved = interleaved
        self.scaling = dict(scaling) if scaling else None
        self.kind = _kind(self.scaling, call)
        self.attention_factor = _attention_factor(self.scaling) if self.kind == "yarn" else 1.0
        if self.kind == "dynamic" and dim == 2:
            raise ValueError(
                f"{call}: dynamic scaling divides by dim - 2; it needs dim of 4 or more"
            )
        self._tables: dict[tuple[torch.device, torch.dtype], tuple[Tensor, Tensor]] = {}

    @classmethod
    def from_config(cls, config: Any, interleaved: bool = False) -> "RoPE":
        """The rotation that a Hugging Face model config describes.

        Args:
            config: a `transformers` config, or the mapping read from its config.json: `rope_theta`,
                `head_dim` (or `hidden_size` and `num_attention_heads`), `partial_rotary_factor`,
                `max_position_embeddings`, and `rope_parameters` (transformers 5) or `rope_scaling`.
            interleaved: as in the constructor; configs do not say.

        Raises:
            ValueError: scaling parameters per layer type, and whatever the constructor refuses.

        >>> RoPE.from_config({"hidden_size": 24, "num_attention_heads": 3, "rope_theta": 500.0})
        RoPE(8, base=500.0)
        """

        def get(name: str) -> Any:
            return config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)

        scaling = dict(get("rope_parameters") or get("rope_scaling") or {})
        if any(isinstance(value, Mapping) for value in scaling.values()):
            raise ValueError(
                f"RoPE.from_config: rope_parameters={scaling} differ by layer type; "
                "give RoPE(..., scaling=rope_parameters[layer_type]) instead"
            )
        base = scaling.pop("rope_theta", None) or get("rope_theta") or 10000.0
        part = scaling.pop("partial_rotary_factor", None) or get("partial_rotary_factor") or 1.0
        head_dim = get("head_dim") or get("hidden_size") // get("num_attention_heads")
        longest = get("max_position_embeddings")
        kind = scaling.get("rope_type", scaling.get("type", "default"))
        if kind == "dynamic":  # transformers takes the config's own length here
            scaling["original_max_position_embeddings"] = longest
        elif kind != "default":
            scaling.setdefault("original_max_position_embeddings", longest)
        if kind == "yarn" and scaling.get("factor") is None:
            scaling["factor"] = longest / scaling["original_max_position_embeddings"]
        return cls(int(head_dim * part), base, interleaved, None if kind == "default" else scaling)

    @property
    def depends_on_length(self) -> bool:
        """Whether the angles of one position change as the sequence grows (dynamic scaling).

        Keys must then be cached before they are rotated (Peng et al. 2023, end of §3.3).
        """
        return self.kind == "dynamic"

    def frequencies(
        self, length: int = 0, device: torch.device | None = None
    ) -> Float[Tensor, " pairs"]:
        """Radians per token of each pair, float64, `[dim / 2]`.

        `length` is the length of the sequence so far, which only dynamic scaling looks at.
        """
        even = torch.arange(0, self.dim, 2, dtype=torch.float64, device=device) / self.dim
        scaling = self.scaling or {}
        if self.kind == "dynamic":
            grown = max(length, scaling["original_max_position_embeddings"])
            stretch = scaling["factor"] * grown / scaling["original_max_position_embeddings"]
            stretch -= scaling["factor"] - 1
            return (self.base * stretch ** (self.dim / (self.dim - 2))) ** -even
        plain = self.base**-even
        if self.kind == "linear":
            return plain / scaling["factor"]
        if self.kind == "yarn":
            return _yarn(plain, self.base, self.dim, scaling)
        if self.kind == "llama3":
            return _llama3(plain, scaling)
        return plain

    def __call__(
        self, x: Float[Tensor, "B H T D"], offset: int | Int[Tensor, " B"] = 0
    ) -> Float[Tensor, "B H T D"]:
        """Rotates queries or keys that sit at positions `offset`, `offset + 1`, ….

        Args:
            x: `[B, H, T, D]`, D at least `dim`, any floating dtype.
            offset: the position of the first token, one for all or one a batch row.

        Returns:
            a new tensor of x's shape and dtype.

        Raises:
            ValueError: D is smaller than `dim`.
        """
        if x.shape[-1] < self.dim:
            raise ValueError(
                f"RoPE(dim={self.dim}) called with x of shape {list(x.shape)}: "
                f"the head dimension {x.shape[-1]} is smaller than dim"
            )
        dtype = torch.promote_types(x.dtype, torch.float32)
        cos, sin = self._cos_sin(offset, x.shape[-2], x.device, dtype)
        turned = x[..., : self.dim].to(dtype)
        parts = [(_turn_pairs if self.interleaved else _turn_halves)(turned, cos, sin)]
        if self.dim < x.shape[-1]:
            parts.append(x[..., self.dim :].to(dtype))
        return (torch.cat(parts, dim=-1) if len(parts) > 1 else parts[0]).to(x.dtype)

    def _cos_sin(
        self, offset: int | Tensor, count: int, device: torch.device, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """Cosines and sines that broadcast over `[B, H, T, dim / 2]`."""
        if isinstance(offset, Tensor):
            steps = torch.arange(count, device=device)
            positions = offset.to(device)[:, None, None] + steps  # [B, 1, T]
            length = int(positions.max()) + 1 if self.depends_on_length and count else 0
            return self._compute(positions, length, dtype)
        stop = offset + count
        original = (self.scaling or {}).get("original_max_position_embeddings", 0)
        stretched = self.depends_on_length and stop > original
        if stretched or offset < 0 or torch.compiler.is_compiling():
            return self._compute(torch.arange(offset, stop, device=device), stop, dtype)
        cos, sin = self._table(stop, device, dtype)
        return cos[offset:stop], sin[offset:stop]

    def _compute(self, positions: Tensor, length: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        angles = positions[..., None].double() * self.frequencies(length, positions.device)
        scale = self.attention_factor
        return (angles.cos() * scale).to(dtype), (angles.sin() * scale).to(dtype)

    def _table(self, stop: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Rows for positions 0 to at least `stop`, kept and doubled when they run out."""
        kept = self._tables.get((device, dtype))
        if kept is not None and kept[0].shape[0] >= stop:
            return kept
        rows = max(stop, 2 * kept[0].shape[0] if kept is not None else 128)
        # A table born in inference mode could not be saved for a later backward pass.
        with torch.inference_mode(False), torch.no_grad():
            table = self._compute(torch.arange(rows, device=device), 0, dtype)
        if type(table[0]) is Tensor:  # a tracer's stand-in tensor must not outlive the trace
            self._tables[device, dtype] = table
        return table

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RoPE) and self.__getstate__() == other.__getstate__()

    __hash__ = None  # type: ignore[assignment]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_tables": {}}  # tables are cheaper computed than copied

    def __repr__(self) -> str:
        parts = [str(self.dim), f"base={self.base}"]
        if self.interleaved:
            parts.append("interleaved=True")
        if self.scaling:
            parts.append(f"scaling={self.scaling}")
        return f"RoPE({', '.join(parts)})"


def _turn_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turns features i and i + dim/2 of x `[B, H, T, dim]`."""
    a, b = x.chunk(2, dim=-1)
    first = torch.addcmul(a * cos, b, sin, value=-1)
    second = torch.addcmul(b * cos, a, sin)
    return torch.cat((first, second), dim=-1)


def _turn_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turns features 2i and 2i + 1 of x `[B, H, T, dim]`: a product of complex numbers.

    That is several times as fast as strided halves, where the memory can be read so.
    """
    even = x.stride(-1) == 1 and not any(s % 2 for s in (*x.stride()[:-1], x.storage_offset()))
    if even and not torch.compiler.is_compiling():  # compilers know little of complex numbers
        numbers = torch.view_as_complex(x.unflatten(-1, (-1, 2)))
        return torch.view_as_real(numbers * torch.complex(cos, sin)).flatten(-2)
    a, b = x[..., 0::2], x[..., 1::2]
    first = torch.addcmul(a * cos, b, sin, value=-1)
    second = torch.addcmul(b * cos, a, sin)
    return torch.stack((first, second), dim=-1).flatten(-2)


def _kind(scaling: dict[str, Any] | None, call: str) -> str:
    """The scaling's type, after checking that it is known and complete."""
    if scaling is None:
        return "default"
    kind = scaling.get("rope_type", scaling.get("type"))
    if kind not in _NEEDS:
        raise ValueError(f"{call}: rope_type {kind!r} is not one of {', '.join(_NEEDS)}")
    missing = [key for key in _NEEDS[kind] if scaling.get(key) is None]
    if missing:
        raise ValueError(f"{call}: rope_type {kind!r} also needs {', '.join(missing)}")
    if kind != "default" and not scaling["factor"] > 0:
        raise ValueError(f"{call}: factor must be above 0")
    return kind


def _attention_factor(scaling: dict[str, Any] | None) -> float:
    """YaRN's factor on cosines and sines (Peng et al. 2023, equation 22; on q and k each)."""
    assert scaling is not None
    given = scaling.get("attention_factor")
    if given is not None:
        return float(given)
    factor = scaling["factor"]

    def mscale(weight: float | int) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    weight, weight_all = scaling.get("mscale"), scaling.get("mscale_all_dim")
    return mscale(weight) / mscale(weight_all) if weight and weight_all else mscale(1.0)


def _yarn(plain: Tensor, base: float, dim: int, scaling: dict[str, Any]) -> Tensor:
    """YaRN by parts: pairs that turn often are kept, those that turn rarely are interpolated."""
    length = scaling["original_max_position_embeddings"]

    def pair_that_turns(times: float | int) -> float:  # within the original length
        return dim * math.log(length / (times * 2 * math.pi)) / (2 * math.log(base))

    low = pair_that_turns(scaling.get("beta_fast") or 32.0)
    high = pair_that_turns(scaling.get("beta_slow") or 1.0)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001  # as in the published code: a step instead of a division by zero
    pairs = torch.arange(dim // 2, dtype=plain.dtype, device=plain.device)
    ramp = ((pairs - low) / (high - low)).clamp(0, 1)
    return plain / scaling["factor"] * ramp + plain * (1 - ramp)


def _llama3(plain: Tensor, scaling: dict[str, Any]) -> Tensor:
    """Llama 3.1's rule: long waves are interpolated, short ones kept, a ramp between."""
    turns = scaling["original_max_position_embeddings"] * plain / (2 * math.pi)
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return plain / scaling["factor"] * (1 - keep) + plain * keep
