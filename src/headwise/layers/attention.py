"""The multi-head attention layer: projections around `attend()`."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from ..attend import attend
from ..backends import check_name
from ..core.call import fault_of_numbers
from ..core.mask_algebra import Mask
from ..core.numbers import as_int, fault_of_eps, fault_of_flags, format_value
from ..core.observers import made_by, observers
from ..core.shapes import not_dense
from ..core.unknown import Unknown, refuse_unknown
from .kv_cache import KVCache
from .rope import RoPE

_SEE = (
    "hw.attention_of(layer, {'x': x, 'mask': mask}, layer=0) returns the attention weights, and "
    "hw.watch(layer) statistics of every head"
)
_WEIGHT_OPTIONS = ("need_weights", "average_attn_weights", "output_attentions", "return_attention")
_CONTEXT = "the layer computes keys and values itself, both from x or both from context="
_CACHE = "write cache=hw.KVCache(), the same object for every call of a layer"

_IN_CALLS = dict.fromkeys(_WEIGHT_OPTIONS, _SEE) | {
    "key": _CONTEXT,
    "value": _CONTEXT,
    "past_key_value": _CACHE,
    "past_key_values": _CACHE,
    "use_cache": _CACHE,
    "dropout_p": "give dropout= to the layer when it is built",
    "softmax_scale": "give scale= to the layer when it is built",
    "sm_scale": "give scale= to the layer when it is built",
}
"""Hints for arguments of other libraries in calls of the layer, where they differ from those for
`attend`."""

_MASKS = (
    "is_causal causal mask attn_mask attention_mask attn_bias key_padding_mask window_size "
    "sliding_window"
).split()
_KV_DIM = "write kv_dim=, the width of the context from which keys and values are computed"
_SINKS = "sinks=True gives each head a learned logit that takes a share of its attention"
_WHEN_BUILT = (
    dict.fromkeys(_WEIGHT_OPTIONS, _SEE)
    | dict.fromkeys(_MASKS, "give the mask to the call: layer(x, mask=hw.Causal())")
    | {
        "batch_first": "omit it: the layer takes and returns [batch, length, embed_dim]",
        "kdim": _KV_DIM,
        "vdim": _KV_DIM,
        "add_bias_kv": _SINKS,
        "add_zero_attn": _SINKS,
        "enable_gqa": "write num_kv_heads=",
        "nhead": "write num_heads=",
        "n_heads": "write num_heads=",
    }
)
"""The same for the constructor."""

_NOTHING = nullcontext()


class HeadNorm(nn.RMSNorm):
    """RMS norm of every head's features. The state dict holds its eps along with the weight."""

    def __init__(self, dim: int, eps: float, **factory: Any) -> None:
        super().__init__(dim, eps=eps, **factory)
        self.register_load_state_dict_pre_hook(_keep_eps)

    def get_extra_state(self) -> Tensor:
        """Return the eps as a tensor, which every file format for tensors can hold."""
        return torch.tensor(self.eps, dtype=torch.float64, device="cpu")

    def set_extra_state(self, state: Tensor) -> None:
        """Set the eps from a state dict."""
        self.eps = float(state)


def _keep_eps(norm: HeadNorm, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Keep the norm's eps if a state dict has none."""
    state.setdefault(f"{prefix}_extra_state", norm.get_extra_state())


class MultiHeadAttention(nn.Module):
    """Multi-head attention (Vaswani et al. 2017 §3.2), self or cross, with grouped heads.

    `out = merge(attend(q, k, v)) W_outᵀ + b_out` with `q, k, v = split(x W_qkvᵀ + b_qkv)`: one
    matrix product computes all three if they read the same input. Query head h reads key/value
    head `h // (num_heads // num_kv_heads)` (Ainslie et al. 2023).

    Args:
        embed_dim: width of the input.
        num_heads: number of query heads H.
        num_kv_heads: number of key/value heads G, a divisor of H; 1 is multi-query attention.
            Default: H.
        head_dim: D. Default: `embed_dim // num_heads`.
        kv_dim: width of `context`, if it differs from `embed_dim`; each call then needs a context.
        out_dim: width of the output. Default: `embed_dim`.
        bias: bias of the projections to q, k and v: one bool, or three.
        out_bias: bias of the output projection. Default: True if q, k or v has a bias.
        dropout: probability of dropping an attention weight, in training mode only.
        rope: rotary positions for q and k, continued through a cache.
        qk_norm: RMS norm of every head's q and k, each with a learned weight (as in Qwen 3), before
            the rotation.
        qk_norm_eps: added to the mean square in these norms. The state dict holds it, so
            `load_state_dict` sets it.
        softcap: scores become `softcap * tanh(score / softcap)`.
        scale: factor of the scores. Default: `head_dim ** -0.5`.
        sinks: one learned logit per head, `layer.sinks` `[H]`, which takes part of every row's
            attention and contributes no value (as in GPT-OSS).
        backend: as in `attend()`.

    Raises:
        ValueError: sizes do not divide, or a value is out of range; the message names it.

    Weights: `qkv` is a Linear whose rows are q's heads, then k's, then v's (with a different
    `kv_dim`: `q` and `kv`); `out` is the output projection. Initial weights are Xavier uniform,
    separately for q, k and v, and biases are 0. If only some of q, k and v have a bias, `some_bias`
    holds these biases in one vector.

    >>> import torch, headwise as hw
    >>> layer = hw.MultiHeadAttention(24, num_heads=3)
    >>> x = torch.randn(2, 7, 24)
    >>> layer(x, mask=hw.Causal()).shape
    torch.Size([2, 7, 24])
    >>> cache = hw.KVCache()
    >>> with torch.no_grad():
    ...     parts = [layer(x[:, :5], mask=hw.Causal(), cache=cache)]
    ...     parts += [layer(x[:, t : t + 1], mask=hw.Causal(), cache=cache) for t in (5, 6)]
    >>> torch.cat(parts, dim=1).allclose(layer(x, mask=hw.Causal()), atol=1e-6)
    True
    """

    head_shard: Any = None
    """The heads that this rank computes, if `hw.parallel` has sharded the layer by heads."""
    sequence_shard: Any = None
    """The positions that this rank computes, if `hw.parallel` has sharded it by positions."""

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        kv_dim: int | None = None,
        out_dim: int | None = None,
        bias: bool | tuple[bool, bool, bool] = True,
        out_bias: bool | None = None,
        dropout: float = 0.0,
        rope: RoPE | None = None,
        qk_norm: bool = False,
        qk_norm_eps: float = 1e-6,
        softcap: float | None = None,
        scale: float | None = None,
        sinks: bool = False,
        backend: str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **unknown: Unknown,
    ) -> None:
        if unknown:
            init = MultiHeadAttention.__init__
            refuse_unknown("MultiHeadAttention(embed_dim, num_heads", init, unknown, _WHEN_BUILT)
        super().__init__()
        _check_sizes(embed_dim, num_heads, num_kv_heads, head_dim, kv_dim, out_dim)
        self.embed_dim = embed_dim
        self.num_heads = num_heads
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.head_dim = embed_dim // num_heads if head_dim is None else head_dim
        self.kv_dim = embed_dim if kv_dim is None else kv_dim
        self.out_dim = embed_dim if out_dim is None else out_dim
        self.bias = tuple(bias) if isinstance(bias, tuple | list) else (bias, bias, bias)
        self.out_bias = any(self.bias) if out_bias is None else out_bias
        self.dropout = dropout
        self.rope = rope
        self.softcap = softcap
        self.scale = scale
        self.backend = backend
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.sinks = None
        _check_values(self, qk_norm_eps, qk_norm=qk_norm, sinks=sinks)
        if sinks:
            self.sinks = nn.Parameter(torch.empty(num_heads, **factory))
        self.q_norm = HeadNorm(self.head_dim, qk_norm_eps, **factory) if qk_norm else None
        self.k_norm = HeadNorm(self.head_dim, qk_norm_eps, **factory) if qk_norm else None
        self._build(**factory)
        self.reset_parameters()

    @classmethod
    def from_torch(cls, mha: nn.MultiheadAttention) -> "MultiHeadAttention":
        """Build a layer with copies of the weights of an `nn.MultiheadAttention`.

        The layer takes and returns `[B, length, embed_dim]` regardless of `batch_first`, and takes
        masks by name: `layer(x, mask=hw.Causal())` is `mha(x, x, x, attn_mask=…)[0]`. Device,
        dtype, dropout and training mode are those of `mha`. Use `hw.replace_attention_` to replace
        the modules of a model without changing how they are called.

        Raises:
            ValueError: `mha` is not an `nn.MultiheadAttention`, its `kdim` differs from `vdim`, or
                it uses `add_bias_kv` or `add_zero_attn`.

        >>> mha = nn.MultiheadAttention(24, num_heads=3, batch_first=True)
        >>> layer, x = MultiHeadAttention.from_torch(mha), torch.randn(2, 7, 24)
        >>> torch.allclose(layer(x), mha(x, x, x)[0], atol=1e-6)
        True
        """
        fault = fault_of_torch(mha)
        if fault is None and mha.kdim != mha.vdim:
            fault = f"kdim={mha.kdim} is not vdim={mha.vdim}; {_CONTEXT}"
        if fault is not None:
            raise ValueError(f"MultiHeadAttention.from_torch({type(mha).__name__}): {fault}")
        width, bias, out = mha.embed_dim, mha.in_proj_bias, mha.out_proj
        options: Any = {"bias": bias is not None, "dropout": mha.dropout}
        options |= {"device": out.weight.device, "dtype": out.weight.dtype}
        state = {f"out.{name}": x for name, x in out.state_dict().items()}
        if mha._qkv_same_embed_dim:
            state |= {"qkv.weight": mha.in_proj_weight, "qkv.bias": bias}
        else:
            options["kv_dim"] = mha.kdim
            kv = torch.cat([mha.k_proj_weight, mha.v_proj_weight])  # type: ignore[list-item]
            state |= {"q.weight": mha.q_proj_weight, "kv.weight": kv}
            if bias is not None:
                state |= {"q.bias": bias[:width], "kv.bias": bias[width:]}
        layer = cls(width, mha.num_heads, **options)
        layer.load_state_dict({name: x for name, x in state.items() if x is not None})
        return layer.train(mha.training)

    def _build(self, **factory: Any) -> None:
        """Create the projections; a subclass that keeps its weights elsewhere overrides this,
        `reset_parameters`, `projection`, `_project` and `_merge`."""
        q_rows, kv_rows = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        joined = list(self.bias)
        if self.kv_dim == self.embed_dim:
            self.sections = (q_rows, kv_rows, kv_rows)
            self.qkv = nn.Linear(self.embed_dim, sum(self.sections), bias=all(joined), **factory)
        else:
            joined = joined[1:]
            self.sections = (kv_rows, kv_rows)
            self.q = nn.Linear(self.embed_dim, q_rows, bias=self.bias[0], **factory)
            self.kv = nn.Linear(self.kv_dim, sum(self.sections), bias=all(joined), **factory)
        some = sum(rows for rows, on in zip(self.sections, joined, strict=True) if on)
        partial = any(joined) and not all(joined)
        self.some_bias = nn.Parameter(torch.empty(some, **factory)) if partial else None
        out_rows = self.num_heads * self.head_dim
        self.out = nn.Linear(out_rows, self.out_dim, bias=self.out_bias, **factory)

    def reset_parameters(self) -> None:
        """Reinitialize q, k, v and out by Xavier uniform, biases and sinks to 0, norms to 1."""
        weights = [self.out.weight]
        if self.head_shard is not None:
            weights += self.head_shard.weights(self)
        elif self.kv_dim == self.embed_dim:
            weights += self.qkv.weight.split(self.sections)
        else:
            weights += [self.q.weight, *self.kv.weight.split(self.sections)]
        with torch.no_grad():
            for weight in weights:
                nn.init.xavier_uniform_(weight)
            for name, parameter in self.named_parameters():
                if name.endswith(("bias", "sinks")):
                    parameter.zero_()
                elif name.endswith("norm.weight"):
                    parameter.fill_(1.0)

    def forward(
        self,
        x: Float[Tensor, "*B T E"],
        context: Float[Tensor, "*B S C"] | None = None,
        *more: object,
        mask: Mask | None = None,
        cache: KVCache | None = None,
        **unknown: Unknown,
    ) -> Float[Tensor, "*B T O"]:
        """Attend from every position of x to x itself, or to `context`.

        Args:
            x: `[B, T, embed_dim]`, or `[T, embed_dim]` without a batch.
            context: `[B, S, kv_dim]`, or `[S, kv_dim]`, for cross-attention; keys and values come
                from it.
            mask: the pairs that may attend. None lets every query see every key, even later ones.
            cache: the earlier keys and values of this layer, to which those of x are appended. A
                cache with a window needs a mask with the same `Window(n)`.

        Returns:
            `[B, T, out_dim]`, or `[T, out_dim]`.

        Raises:
            ValueError: shapes do not fit the layer or each other; a layer with its own `kv_dim`
                has no context; a context is given together with a cache (which continues one
                text) or with RoPE (x and context have no common positions); or the cache or
                `attend()` raises it.
            TypeError: an unknown argument, such as PyTorch's `is_causal` or a third tensor; the
                message suggests the equivalent argument.
        """
        if more or unknown:
            _refuse(more, unknown)
        if getattr(x, "ndim", 0) == 2 and getattr(context, "ndim", 2) == 2:
            one = None if context is None else context[None]
            return self.forward(x[None], one, mask=mask, cache=cache)[0]
        self._check_call(x, context, cache)
        if self.head_shard is None:
            q, k, v = self._project(x, context)
        else:
            q, k, v = self.head_shard.project(self, x, context)
        if self.q_norm is not None and self.k_norm is not None:
            wide = self.q_norm.weight.dtype  # under autocast q is narrower than the weight
            q, k = self.q_norm(q.to(wide)).to(v.dtype), self.k_norm(k.to(wide)).to(v.dtype)
        if cache is None:
            q, k, v = self._place(q, k, v, None)
            with self._observed(context is None, 0):
                out = self._attend(q, k, v, mask)
            return self._merge(out)
        mark = cache.mark()
        try:
            q, k, v = self._place(q, k, v, cache)
            with self._observed(True, cache.length - k.shape[2]):
                out = self._attend(q, k, v, mask)
            return self._merge(out)
        except BaseException:  # undo a call that failed or was interrupted
            cache.rewind(mark)
            raise

    def _observed(self, own_positions: bool, first_key: int) -> AbstractContextManager[None]:
        """Return a context that names this layer to observers, if any, as the source of calls."""
        if torch.compiler.is_compiling() or not observers:
            return _NOTHING
        return made_by(self, own_positions, first_key)

    def _check_call(self, x: Tensor, context: Tensor | None, cache: KVCache | None) -> None:
        fault = not_dense(x)
        if fault is not None:
            fault = f"x {fault}"
        elif context is not None and (wrong := not_dense(context)):
            hint = "; give the mask by name, mask=…" if isinstance(context, Mask) else ""
            fault = f"context {wrong}{hint}"
        elif cache is not None and not isinstance(cache, KVCache):
            fault = f"cache must be a KVCache, got {format_value(cache)}; write cache=hw.KVCache()"
        if fault is not None:
            raise ValueError(f"MultiHeadAttention({self.extra_repr()}): {fault}")
        fault = self._fault_of_sharding() if self.head_shard is None else None
        if x.ndim != 3 or x.shape[2] != self.embed_dim:
            fault = f"x must be [B, T, {self.embed_dim}] or [T, {self.embed_dim}]"
        elif context is None:
            if self.kv_dim != self.embed_dim:
                fault = f"kv_dim={self.kv_dim} requires a context of that width"
        elif context.ndim != 3 or context.shape[2] != self.kv_dim or len(context) != len(x):
            fault = f"context must be [B={len(x)}, S, {self.kv_dim}]"
        elif cache is not None:
            fault = "a cache continues x; it cannot be given with a context"
        elif self.rope is not None:
            fault = "x and context have no common positions; build the layer with rope=None"
        if self.sequence_shard is not None and not (context is None and cache is None):
            given = "a cache" if context is None else "a context"
            fault = f"{given} cannot be given to a layer whose positions are sharded over ranks"
        if fault is not None:
            given = "" if context is None else f", context {list(context.shape)}"
            call = f"MultiHeadAttention({self.extra_repr()})(x {list(x.shape)}{given})"
            raise ValueError(f"{call}: {fault}")

    def _fault_of_sharding(self) -> str | None:
        """Return a description of what is wrong with a fused projection sharded over ranks."""
        for name in ("qkv", "kv"):
            linear = self._modules.get(name)
            if linear is None or type(linear._parameters.get("weight")) is nn.Parameter:
                continue
            placements = getattr(linear.weight, "placements", ())
            if any(place.is_shard(0) for place in placements):  # type: ignore[union-attr]
                return (
                    f"{name}.weight is sharded over ranks in blocks of rows, which split the "
                    f"sections of q, k and v; shard the layer by "
                    f"hw.parallel.plan(model)"
                )
        return None

    def _project(self, x: Tensor, context: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Return q `[B, H, T, D]`, k and v `[B, G, S, D]` as views of the products, without copies.

        Under autograd, rows are split before heads: the backward pass then joins the three
        gradients in the memory order that the product's backward reads. Without autograd, heads are
        split first, which takes fewer steps.
        """
        if self.kv_dim != self.embed_dim:
            assert context is not None
            q, kv = self.q(x), self._linear(self.kv, context)
        elif context is None:
            rows = self._linear(self.qkv, x)
            if not rows.requires_grad:
                kv_heads = self.num_kv_heads
                sizes = self.num_heads, kv_heads, kv_heads
                q, k, v = self._heads(rows).split_with_sizes(sizes, dim=1)
                return q, k, v
            q, k, v = rows.split(self.sections, dim=-1)
            return self._heads(q), self._heads(k), self._heads(v)
        else:
            rows, weight, bias = self.sections[0], self.qkv.weight, self._joined_bias(self.qkv)
            q = F.linear(x, weight[:rows], None if bias is None else bias[:rows])
            kv = F.linear(context, weight[rows:], None if bias is None else bias[rows:])
        k, v = kv.split(self.sections[-2:], dim=-1)
        return self._heads(q), self._heads(k), self._heads(v)

    def _heads(self, rows: Tensor) -> Tensor:
        """Return `[B, T, N * D]` as a view `[B, N, T, D]`."""
        b, t, width = rows.shape
        return rows.view(b, t, width // self.head_dim, self.head_dim).transpose(1, 2)

    def _linear(self, linear: nn.Linear, x: Tensor) -> Tensor:
        if self.some_bias is None:
            return linear(x)
        return F.linear(x, linear.weight, self._joined_bias(linear))

    def _joined_bias(self, linear: nn.Linear) -> Tensor | None:
        """Return the bias of all sections, with zeros for those without a bias."""
        if self.some_bias is None:
            return linear.bias
        on = self.bias[-len(self.sections) :]
        lengths = [rows for rows, has in zip(self.sections, on, strict=True) if has]
        given = iter(self.some_bias.split(lengths))
        parts = [
            next(given) if has else self.some_bias.new_zeros(rows)
            for rows, has in zip(self.sections, on, strict=True)
        ]
        return torch.cat(parts)

    def _place(
        self, q: Tensor, k: Tensor, v: Tensor, cache: KVCache | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Rotate q and k at their positions and add k and v to the cache."""
        if self.sequence_shard is not None:
            if self.rope is not None:
                q, k = (self.sequence_shard.rotate(self.rope, x) for x in (q, k))
            return q, k, v
        first = 0 if cache is None else cache.length
        if self.rope is not None:
            q = self.rope(q, first)
            if not self.rope.depends_on_length:
                k = self.rope(k, first)
        if cache is not None:
            k, v = cache.append(k, v)
        if (
            self.rope is not None and self.rope.depends_on_length
        ):  # all keys are rotated again, so the cache holds them unrotated
            k = self.rope(k, first + q.shape[2] - k.shape[2])
        return q, k, v

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask | None) -> Tensor:
        run = attend if self.sequence_shard is None else self.sequence_shard.attend
        dropout, shard = self.dropout if self.training else 0.0, self.head_shard
        own = shard.own_random_numbers(q.device) if shard is not None and dropout else _NOTHING
        with own:
            return run(
                q,
                k,
                v,
                mask=mask,
                scale=self.scale,
                softcap=self.softcap,
                dropout=dropout,
                sinks=self._here(self.sinks),
                backend=self.backend,
            )

    @property
    def first_head(self) -> int:
        """The index of the first head computed here; may be above 0 in a shard of a layer."""
        return 0 if self.head_shard is None else self.head_shard.first

    @property
    def all_heads(self) -> int:
        """The number of heads of the whole layer, of which `num_heads` are computed here."""
        return self.num_heads if self.head_shard is None else self.head_shard.all_heads

    @property
    def projection(self) -> Tensor:
        """Weight of the output projection, `[out_dim, num_heads · head_dim]`."""
        return self._here(self.out.weight)

    def _here(self, parameter: Any) -> Any:
        """Return the part of a parameter that belongs to the heads computed here."""
        if self.head_shard is None or parameter is None:
            return parameter
        return parameter.to_local()

    def _merge(self, out: Tensor) -> Tensor:
        """Return `[B, H, T, D]` projected to `[B, T, out_dim]`."""
        return self.out(out.transpose(1, 2).flatten(2))

    def extra_repr(self) -> str:
        """Return the sizes and every option that differs from its default."""
        parts = [f"embed_dim={self.embed_dim}", f"num_heads={self.num_heads}"]
        defaults = {
            "num_kv_heads": self.num_heads,
            "head_dim": self.embed_dim // self.num_heads,
            "kv_dim": self.embed_dim,
            "out_dim": self.embed_dim,
            "bias": (True, True, True),
            "out_bias": any(self.bias),
            "dropout": 0.0,
            "rope": None,
            "softcap": None,
            "scale": None,
            "backend": "auto",
        }
        parts += [
            f"{name}={getattr(self, name)!r}"
            for name, usual in defaults.items()
            if getattr(self, name) != usual
        ]
        if self.sinks is not None:
            parts.append("sinks=True")
        if self.head_shard is not None:
            parts.append(str(self.head_shard))
        return ", ".join(parts)


def fault_of_torch(mha: object) -> str | None:
    """Return the reason why a module cannot be replaced with headwise's layer."""
    if type(mha) is not nn.MultiheadAttention:
        return "give an nn.MultiheadAttention; a subclass may compute something different"
    if mha.bias_k is not None:
        return "it was built with add_bias_kv=True, a learned key and value, which is not supported"
    if mha.add_zero_attn:
        return "it was built with add_zero_attn=True, a key of zeros, which is not supported"
    return None


def _refuse(more: tuple[object, ...], unknown: dict[str, Unknown]) -> NoReturn:
    """Raise TypeError for unknown arguments in a call of the layer."""
    if more:
        hint = "give masks and caches by name: mask=…, cache=…"
        if all(isinstance(one, Tensor) for one in more):
            hint = "the layer computes q, k and v itself; use hw.attend(q, k, v) for your own"
        raise TypeError(
            f"MultiHeadAttention.forward(x, context, …): {2 + len(more)} positional arguments were "
            f"given, and there are two: layer(x) attends from x to itself, layer(x, context) to a "
            f"context; {hint}."
        )
    call = "MultiHeadAttention.forward(x"
    refuse_unknown(call, MultiHeadAttention.forward, unknown, _IN_CALLS)


def _check_sizes(
    embed_dim: int,
    num_heads: int,
    num_kv_heads: int | None,
    head_dim: int | None,
    kv_dim: int | None,
    out_dim: int | None,
) -> None:
    sizes = {
        "embed_dim": embed_dim,
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "kv_dim": kv_dim,
        "out_dim": out_dim,
    }
    shown = ", ".join(
        f"{name}={format_value(size)}" for name, size in sizes.items() if size is not None
    )
    call = f"MultiHeadAttention({shown})"
    for name, size in sizes.items():
        if size is not None and as_int(size) is None:
            raise ValueError(f"{call}: {name} must be a whole number")
        if size is not None and size < 1:
            raise ValueError(f"{call}: {name} must be at least 1")
    if head_dim is None and embed_dim % num_heads:
        raise ValueError(
            f"{call}: embed_dim must be a multiple of num_heads, or head_dim must be given"
        )
    if num_kv_heads is not None and num_heads % num_kv_heads:
        raise ValueError(f"{call}: num_heads must be a multiple of num_kv_heads")


def _check_values(layer: MultiHeadAttention, qk_norm_eps: float, **flags: object) -> None:
    call = f"MultiHeadAttention({layer.extra_repr()})"
    if len(layer.bias) != 3 or not all(isinstance(one, bool) for one in layer.bias):
        raise ValueError(f"{call}: bias={layer.bias} must be one bool, or three for q, k and v")
    if fault := fault_of_flags(out_bias=layer.out_bias, **flags):
        raise ValueError(f"{call}: {fault}")
    numbers = layer.scale, layer.softcap, layer.dropout, torch.float64
    if fault := fault_of_numbers(*numbers) or fault_of_eps(qk_norm_eps):
        raise ValueError(f"{call}: {fault}")
    check_name(layer.backend)
    if not isinstance(layer.rope, RoPE | None):
        raise ValueError(f"{call}: rope must be a RoPE, such as hw.RoPE({layer.head_dim}), or None")
    if layer.rope is not None and layer.rope.dim > layer.head_dim:
        raise ValueError(f"{call}: rope.dim is larger than head_dim={layer.head_dim}")
