"""`attend` with the signatures that others' tests call."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import headwise as hw
from headwise.backends import BACKENDS


def backends() -> list[str]:
    """Every backend, and the choice among them."""
    return [*(backend.name for backend in BACKENDS), "auto"]


def scaled_dot_product_attention(*tensors: Tensor, backend: str = "auto", **options: Any) -> Tensor:
    """`F.scaled_dot_product_attention`, computed by `attend`."""
    call = Call.of_pytorch(*tensors, **options)
    return call.give(hw.attend(call.q, call.k, call.v, **call.options, backend=backend))


def reasons(*tensors: Tensor, backend: str, **options: Any) -> tuple[str, ...]:
    """Why the backend does not serve that call; nothing if it does."""
    call = Call.of_pytorch(*tensors, **options)
    choices = hw.explain(call.q, call.k, call.v, **call.options).choices
    return {choice.name: choice.reasons for choice in choices}.get(backend, ())


@dataclass(frozen=True)
class Call:
    """A call of `F.scaled_dot_product_attention` as one of `attend`."""

    q: Tensor
    k: Tensor
    v: Tensor
    options: dict[str, Any]
    lead: tuple[int, ...]

    @classmethod
    def of_pytorch(
        cls,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> "Call":
        """The same arguments, with their defaults."""
        lead, q, k, v = split(query, key, value, enable_gqa)
        if is_causal and attn_mask is not None:
            raise RuntimeError("Explicit attn_mask should not be set when is_causal=True")
        mask = causal(q, k) if is_causal else table(attn_mask, lead, q, k)
        return cls(q, k, v, {"mask": mask, "scale": scale, "dropout": dropout_p}, lead)

    def give(self, out: Tensor) -> Tensor:
        """The output with the axes that the queries came with."""
        return out.reshape(*self.lead, *out.shape[-2:])


def causal(q: Tensor, k: Tensor) -> hw.Mask:
    """PyTorch's `is_causal`, which counts from the first key where `Causal()` ends at the last."""
    queries, keys = q.shape[-2], k.shape[-2]
    if queries == keys:
        return hw.Causal()
    return hw.Dense(torch.ones(queries, keys, dtype=torch.bool, device=q.device).tril())


def table(mask: Tensor | None, lead: tuple[int, ...], q: Tensor, k: Tensor) -> hw.Mask | None:
    """A mask given as a tensor: booleans say who may attend, floats are added."""
    if mask is None:
        return None
    if mask.dim() > 4 or (len(lead) > 2 and mask.dim() > 3):
        mask = mask.expand(*lead, q.shape[-2], k.shape[-2]).flatten(0, len(lead) - 2)
    return hw.Dense(mask) if mask.dtype == torch.bool else hw.Bias(mask)


def split(
    query: Tensor, key: Tensor, value: Tensor, grouped: bool
) -> tuple[tuple[int, ...], Tensor, Tensor, Tensor]:
    """The axes before queries and features, and the three as `[B, H, T, D]`.

    Any number of such axes is allowed, and all broadcast; only those of heads may differ if
    key/value heads are shared.
    """
    three = query, key, value
    depth = max(x.dim() for x in three) - 2
    heads = [x.shape[-3] if x.dim() > 2 else 1 for x in three]
    if not grouped:
        heads = [max(heads) if n == 1 else n for n in heads]
    lead = torch.broadcast_shapes(*(x.shape[:-3] for x in three))
    batch = lead.numel() if isinstance(lead, torch.Size) else 1
    q, k, v = (
        x.expand(*lead, n, *x.shape[-2:]).reshape(batch, n, *x.shape[-2:])
        for x, n in zip(three, heads, strict=True)
    )
    return (*lead, heads[0])[:depth] if depth else (), q, k, v
