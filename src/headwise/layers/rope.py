"""Rotary positions (RoPE): both pairings of the features, and the scalings used in configs.

Su et al. 2021, "RoFormer". Pair i of a head's features is rotated by the angle `position * f_i`,
`f_i = base ** (-2i / dim)`, so that a score q·k depends only on the distance of the two positions.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..core.call import BoundedCache
from ..core.modes import traced
from ..core.numbers import as_int, fault_of_flags, format_value, real
from ..core.shapes import not_dense

SHORT = 4096
"""The length up to which a table starts at position 0; beyond it, each call has its own table.
"""

_NEEDS = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
    "llama3": ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
}
"""The keys that each `rope_type` requires."""

_OPTIONAL = ("attention_factor", "mscale", "mscale_all_dim", "beta_fast", "beta_slow")
"""Keys of numbers that may be missing or None."""


class RoPE:
    """Rotary positions, as an object without parameters that all layers can share.

    Args:
        dim: the number of leading features of a head that are rotated (even); the other features
            pass unchanged.
        base: `rope_theta` in configs; the longest wavelength is near `2π * base` tokens.
        interleaved: which features form a pair. False: i and i + dim/2 (Hugging Face's Llama);
            True: 2i and 2i + 1 (the paper, and Meta's own weights).
        scaling: None, or a mapping with the keys of Hugging Face configs: `rope_type` (or the
            older `type`), one of default, linear, dynamic (NTK-aware, Peng et al. 2023 §3.3),
            yarn (ibid. §3.4, with its attention factor) and llama3; `factor`,
            `original_max_position_embeddings`, and for yarn optionally `attention_factor`,
            `mscale`, `mscale_all_dim`, `beta_fast`, `beta_slow`, `truncate`.

    Angles are computed in float64, and features are rotated in at least float32. `transformers`
    computes angles in float32: they differ by rounding, up to about `position * 1e-7` radians.

    Raises:
        ValueError: `dim` is not a positive even number, `base` is not positive and finite, or
            `scaling` is unknown, lacks a key or contains a value that is not a number.

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
        features, longest = as_int(dim), real(base)
        if features is None or features < 2 or features % 2:
            raise ValueError(
                f"{call}: dim must be an even whole number of at least 2; features rotate in pairs"
            )
        if longest is None or not 0 < longest < math.inf:
            raise ValueError(f"{call}: base must be above 0 and finite")
        if fault := fault_of_flags(interleaved=interleaved):
            raise ValueError(f"{call}: {fault}")
        if not isinstance(scaling, Mapping | None):
            raise ValueError(
                f"{call}: scaling must be None or a mapping, such as "
                '{"rope_type": "linear", "factor": 2.0}'
            )
        self.dim = dim = features
        self.base = longest
        self.interleaved = interleaved
        self.scaling = dict(scaling) if scaling else None
        self.kind = _kind(self.scaling, call)
        self.attention_factor = _attention_factor(self.scaling) if self.kind == "yarn" else 1.0
        if self.kind == "dynamic" and dim == 2:
            raise ValueError(
                f"{call}: dynamic scaling divides by dim - 2; it needs dim of 4 or more"
            )
        if self.kind == "yarn" and self.base <= 1:
            raise ValueError(f"{call}: yarn divides by log(base); base must be above 1")
        self._tables: BoundedCache[tuple[object, ...], tuple[Tensor, Tensor]] = BoundedCache(
            _TABLES
        )

    @classmethod
    def from_config(cls, config: Any, interleaved: bool = False) -> "RoPE":
        """Build the rotation that a Hugging Face model config describes.

        Args:
            config: a `transformers` config, or the mapping read from its config.json: `rope_theta`,
                `head_dim` (or `hidden_size` and `num_attention_heads`), `partial_rotary_factor`,
                `max_position_embeddings`, and `rope_parameters` (transformers 5) or `rope_scaling`.
            interleaved: as in the constructor; configs do not contain it.

        Raises:
            ValueError: scaling parameters differ by layer type, the config lacks a size, or the
                constructor raises it.

        >>> RoPE.from_config({"hidden_size": 24, "num_attention_heads": 3, "rope_theta": 500.0})
        RoPE(8, base=500.0)
        """

        def get(name: str) -> Any:
            return config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)

        given = get("rope_parameters") or get("rope_scaling") or {}
        if not isinstance(given, Mapping):
            raise ValueError(
                f"RoPE.from_config: rope_scaling={format_value(given)} must be a mapping"
            )
        scaling = dict(given)
        if any(isinstance(value, Mapping) for value in scaling.values()):
            raise ValueError(
                f"RoPE.from_config: rope_parameters={scaling} differ by layer type; "
                "give RoPE(..., scaling=rope_parameters[layer_type]) instead"
            )
        base = scaling.pop("rope_theta", None) or get("rope_theta") or 10000.0
        part = scaling.pop("partial_rotary_factor", None) or get("partial_rotary_factor") or 1.0
        kind = scaling.get("rope_type", scaling.get("type", "default"))
        wanted = [] if get("head_dim") else ["hidden_size", "num_attention_heads"]
        if kind != "default":
            wanted.append("max_position_embeddings")
        for name in wanted:
            if not as_int(get(name)):
                raise ValueError(
                    f"RoPE.from_config: {name} must be a whole number, got "
                    f"{format_value(get(name))}; "
                    f"if the config lacks it, give RoPE(dim, …) instead"
                )
        head_dim = get("head_dim") or get("hidden_size") // get("num_attention_heads")
        longest = get("max_position_embeddings")
        if kind == "dynamic":  # transformers takes the config's own length here
            scaling["original_max_position_embeddings"] = longest
        elif kind != "default":
            scaling.setdefault("original_max_position_embeddings", longest)
        if kind == "yarn" and scaling.get("factor") is None:
            scaling["factor"] = longest / scaling["original_max_position_embeddings"]
        return cls(int(head_dim * part), base, interleaved, None if kind == "default" else scaling)

    @property
    def depends_on_length(self) -> bool:
        """True if the angles of one position change as the sequence grows (dynamic scaling).

        Keys must then be cached before they are rotated (Peng et al. 2023, end of §3.3).
        """
        return self.kind == "dynamic"

    def frequencies(
        self, length: int = 0, device: torch.device | None = None
    ) -> Float[Tensor, " pairs"]:
        """Return the radians per token of each pair, float64, `[dim / 2]`.

        `length` is the length of the sequence so far, which only dynamic scaling uses.
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
        """Rotate queries or keys at positions `offset`, `offset + 1`, ….

        Args:
            x: `[B, H, T, D]`, D at least `dim`, any floating dtype.
            offset: the position of the first token, one for all or one per batch row.

        Returns:
            A new tensor of x's shape and dtype.

        Raises:
            ValueError: x is not a floating-point tensor with four axes, D is smaller than `dim`, or
                the offset is not a whole number.
        """
        if fault := self._fault_of(x, offset):
            raise ValueError(f"RoPE(dim={self.dim}) called with {fault}")
        dtype = torch.promote_types(x.dtype, torch.float32)
        cos, sin = self._cos_sin(offset, x.shape[-2], x.device, dtype)
        turned = x[..., : self.dim].to(dtype)
        parts = [(_turn_pairs if self.interleaved else _turn_halves)(turned, cos, sin)]
        if self.dim < x.shape[-1]:
            parts.append(x[..., self.dim :].to(dtype))
        return (torch.cat(parts, dim=-1) if len(parts) > 1 else parts[0]).to(x.dtype)

    def _fault_of(self, x: Tensor, offset: int | Tensor) -> str | None:
        """Return a description of why x cannot be rotated at an offset."""
        if fault := not_dense(x):
            return f"x that {fault}"
        if x.dim() != 4:
            return f"x of shape {list(x.shape)}: give queries or keys of heads, [B, H, T, D]"
        if not x.is_floating_point():
            return f"x of {x.dtype}: give a floating-point tensor"
        if x.shape[-1] < self.dim:
            return (
                f"x of shape {list(x.shape)}: the head dimension {x.shape[-1]} is smaller than dim"
            )
        if not isinstance(offset, Tensor):
            fits = isinstance(offset, torch.SymInt) or as_int(offset) is not None
        else:
            integral = not (offset.is_floating_point() or offset.is_complex())
            fits = integral and offset.dtype != torch.bool and offset.numel() in (1, len(x))
        if fits:
            return None
        return (
            f"offset={format_value(offset)}: give the position of the first token as a "
            f"whole number, or a "
            f"tensor of whole numbers with one for each of {len(x)} batch rows"
        )

    def _cos_sin(
        self, offset: int | Tensor, count: int, device: torch.device, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """Return cosines and sines that broadcast over `[B, H, T, dim / 2]`."""
        if isinstance(offset, Tensor):
            steps = torch.arange(count, device=device)
            positions = offset.to(device).view(-1, 1, 1) + steps  # [B, 1, T]
            length = int(positions.max()) + 1 if self.depends_on_length and count else 0
            return self._compute(positions, length, dtype)
        stop = offset + count
        original = (self.scaling or {}).get("original_max_position_embeddings", 0)
        stretched = self.depends_on_length and stop > original
        if stretched or traced():
            return self._compute(torch.arange(offset, stop, device=device), stop, dtype)
        if offset < 0 or stop > SHORT:
            return self._table(offset, stop, device, dtype)
        cos, sin = self._table(0, max(128, 1 << (stop - 1).bit_length()), device, dtype)
        return cos[offset:stop], sin[offset:stop]

    def _compute(self, positions: Tensor, length: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        angles = positions[..., None].double() * self.frequencies(length, positions.device)
        scale = self.attention_factor
        return (angles.cos() * scale).to(dtype), (angles.sin() * scale).to(dtype)

    def _table(
        self, first: int, stop: int, device: torch.device, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """Return rows for positions `first` to `stop`, cached for later calls and layers."""
        key = (first, stop, device, dtype)
        kept = self._tables.get(key)
        if kept is None:
            # A table created in inference mode could not be saved for a later backward pass.
            with torch.inference_mode(False), torch.no_grad():
                kept = self._compute(torch.arange(first, stop, device=device), 0, dtype)
            if type(kept[0]) is Tensor:  # a fake tensor must not outlive its mode
                self._tables[key] = kept
        return kept

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RoPE) and self.__getstate__() == other.__getstate__()

    __hash__ = None  # type: ignore[assignment]

    def __getstate__(self) -> dict[str, Any]:
        # Computing tables is cheaper than copying them.
        return {**self.__dict__, "_tables": BoundedCache(_TABLES)}

    def __repr__(self) -> str:
        parts = [str(self.dim), f"base={self.base}"]
        if self.interleaved:
            parts.append("interleaved=True")
        if self.scaling:
            parts.append(f"scaling={self.scaling}")
        return f"RoPE({', '.join(parts)})"


def _turn_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate features i and i + dim/2 of x `[B, H, T, dim]`."""
    a, b = x.chunk(2, dim=-1)
    first = torch.addcmul(a * cos, b, sin, value=-1)
    second = torch.addcmul(b * cos, a, sin)
    return torch.cat((first, second), dim=-1)


def _turn_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate features 2i and 2i + 1 of x `[B, H, T, dim]` by a product of complex numbers.

    Strided halves, several times as slow, are used if the memory layout does not allow that.
    """
    even = x.stride(-1) == 1 and not any(s % 2 for s in (*x.stride()[:-1], x.storage_offset()))
    if even and not torch.compiler.is_compiling():  # compilers support complex numbers poorly
        numbers = torch.view_as_complex(x.unflatten(-1, (-1, 2)))
        return torch.view_as_real(numbers * torch.complex(cos, sin)).flatten(-2)
    a, b = x[..., 0::2], x[..., 1::2]
    first = torch.addcmul(a * cos, b, sin, value=-1)
    second = torch.addcmul(b * cos, a, sin)
    return torch.stack((first, second), dim=-1).flatten(-2)


def _kind(scaling: dict[str, Any] | None, call: str) -> str:
    """Return the scaling's type, after checking that it is known and complete."""
    if scaling is None:
        return "default"
    kind = scaling.get("rope_type", scaling.get("type"))
    if not isinstance(kind, str) or kind not in _NEEDS:
        raise ValueError(f"{call}: rope_type {kind!r} is not one of {', '.join(_NEEDS)}")
    missing = [key for key in _NEEDS[kind] if scaling.get(key) is None]
    if missing:
        raise ValueError(f"{call}: rope_type {kind!r} also needs {', '.join(missing)}")
    given = [key for key in _OPTIONAL if kind == "yarn" and scaling.get(key) is not None]
    for key in (*_NEEDS[kind], *given):
        value = real(scaling[key])
        least = "at least" if key in _OPTIONAL else "above"
        if value is None or not 0 <= value < math.inf or (not value and least == "above"):
            raise ValueError(
                f"{call}: {key} must be a finite number {least} 0, got {format_value(scaling[key])}"
            )
    if kind == "llama3" and not scaling["low_freq_factor"] < scaling["high_freq_factor"]:
        raise ValueError(f"{call}: low_freq_factor must be below high_freq_factor")
    return kind


_TABLES = 8
"""The number of tables that a rotation keeps: of short contexts, and of the last few longer calls.
"""


def _attention_factor(scaling: dict[str, Any] | None) -> float:
    """Return YaRN's factor on cosines and sines (Peng et al. 2023, equation 22; on q and on k)."""
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
    """Apply YaRN: keep pairs that rotate often, and interpolate those that rotate rarely."""
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
    """Apply Llama 3.1's rule: interpolate long wavelengths, keep short ones, ramp in between."""
    turns = scaling["original_max_position_embeddings"] * plain / (2 * math.pi)
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return plain / scaling["factor"] * (1 - keep) + plain * keep
