"""Rung 4: the general mechanism, in the notation of the paper (Vaswani et al. 2017 §3.2).

Attention as a function of queries, keys and values; and `MultiHead` for self- and cross-attention,
with separate widths d_k and d_v and any mask. It returns the weights too.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from ._checks import check_heads, check_sizes


def scaled_dot_product_attention(
    Q: Float[Tensor, "*#lead T d_k"],
    K: Float[Tensor, "*#lead S d_k"],
    V: Float[Tensor, "*#lead S d_v"],
    mask: Bool[Tensor, "..."] | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute `softmax(Q Kᵀ / √d_k) V`, for any leading dimensions (batches, heads).

    Args:
        Q: queries `[..., T, d_k]`.
        K: keys `[..., S, d_k]`.
        V: values `[..., S, d_v]`.
        mask: True where a query may attend to a key; broadcasts to `[..., T, S]`.

    Returns:
        The output `[..., T, d_v]` and the weights `[..., T, S]`. Each row of weights sums to 1; a
        query without a visible key has weights and output 0.

    Raises:
        ValueError: shapes do not fit, or the mask is not bool.

    >>> Q = K = V = torch.eye(2)
    >>> output, weights = scaled_dot_product_attention(Q, K, V, torch.eye(2).bool())
    >>> weights.tolist()
    [[1.0, 0.0], [0.0, 1.0]]
    """
    _check(Q, K, V, mask)
    scores = Q @ K.transpose(-2, -1) / K.shape[-1] ** 0.5
    if mask is None:
        weights = torch.softmax(scores, dim=-1)
    else:
        # Not −inf: the softmax of a row of −inf is NaN, which would reach the gradients.
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
        weights = torch.softmax(scores, dim=-1).masked_fill(~mask, 0.0)
    return weights @ V, weights


class MultiHead(nn.Module):
    """`Concat(head_1 … head_h) W_o` with `head_n = Attention(Q W_q, K W_k, V W_v)`.

    Args:
        d_model: width of the inputs and of the output.
        h: number of heads.
        d_k: width of a head's queries and keys; default: `d_model // h`.
        d_v: width of a head's values; default: `d_model // h`.
        bias: True for biases in the four Linears; the paper has none.

    >>> layer = MultiHead(d_model=8, h=2)
    >>> decoder, encoder = torch.randn(3, 5, 8), torch.randn(3, 7, 8)
    >>> output, weights = layer(decoder, encoder)
    >>> output.shape, weights.shape
    (torch.Size([3, 5, 8]), torch.Size([3, 2, 5, 7]))
    """

    def __init__(
        self,
        d_model: int,
        h: int,
        d_k: int | None = None,
        d_v: int | None = None,
        bias: bool = False,
    ) -> None:
        super().__init__()
        check_sizes("MultiHead", d_model=d_model, h=h)
        if d_k is None or d_v is None:
            check_heads("MultiHead", "d_model", d_model, "h", h)
        self.d_model = d_model
        self.h = h
        self.d_k = d_model // h if d_k is None else d_k
        self.d_v = d_model // h if d_v is None else d_v
        check_sizes("MultiHead", d_k=self.d_k, d_v=self.d_v)
        self.W_q = nn.Linear(d_model, h * self.d_k, bias=bias)
        self.W_k = nn.Linear(d_model, h * self.d_k, bias=bias)
        self.W_v = nn.Linear(d_model, h * self.d_v, bias=bias)
        self.W_o = nn.Linear(h * self.d_v, d_model, bias=bias)

    def forward(
        self,
        Q: Float[Tensor, "*B T d_model"],
        K: Float[Tensor, "*B S d_model"] | None = None,
        V: Float[Tensor, "*B S d_model"] | None = None,
        mask: Bool[Tensor, "..."] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Attend from Q to K, and average V.

        Args:
            Q: `[..., T, d_model]`.
            K: `[..., S, d_model]`; default: Q (self-attention).
            V: `[..., S, d_model]`; default: K.
            mask: True where a query may attend: `[T, S]` for all sequences and heads, or with all
                axes of the weights, `[..., 1, T, S]` for all heads or `[..., h, T, S]`.

        Returns:
            The output `[..., T, d_model]` and every head's weights `[..., h, T, S]`.

        Raises:
            ValueError: shapes do not fit, or the mask is not bool.
        """
        K = Q if K is None else K
        V = K if V is None else V
        self._check_call(Q, K, V, mask)
        heads, weights = scaled_dot_product_attention(
            self._split(self.W_q(Q)), self._split(self.W_k(K)), self._split(self.W_v(V)), mask
        )
        return self.W_o(heads.transpose(-3, -2).flatten(-2)), weights

    def _split(self, rows: Tensor) -> Tensor:
        """Split `[..., T, h * d]` into `[..., h, T, d]`."""
        return rows.unflatten(-1, (self.h, -1)).transpose(-3, -2)

    def _check_call(self, Q: Tensor, K: Tensor, V: Tensor, mask: Tensor | None) -> None:
        call = f"MultiHead(d_model={self.d_model}, h={self.h})({_quote(Q, K, V, mask)})"
        for name, x in (("Q", Q), ("K", K), ("V", V)):
            if x.ndim < 2 or x.shape[-1] != self.d_model:
                raise ValueError(f"{call}: {name} must be [..., length, {self.d_model}]")
        # [B, T, S] would be read as [h, T, S], without an error if B equals h.
        if mask is not None and mask.ndim not in (2, Q.ndim + 1):
            raise ValueError(
                f"{call}: the mask must be [T, S] or have an axis for the heads, "
                "[..., 1 or h, T, S]; add it with unsqueeze(-3)"
            )


def _quote(Q: Tensor, K: Tensor, V: Tensor, mask: Tensor | None) -> str:
    if mask is not None and not isinstance(mask, Tensor):
        raise ValueError(
            f"the mask must be a bool tensor, True where a query may attend, got "
            f"{type(mask).__name__}; for a headwise mask: mask.dense(queries=T, keys=S)[0, 0]"
        )
    given = "" if mask is None else f", mask {list(mask.shape)}"
    return f"Q {list(Q.shape)}, K {list(K.shape)}, V {list(V.shape)}{given}"


def _check(Q: Tensor, K: Tensor, V: Tensor, mask: Tensor | None) -> None:
    call = f"scaled_dot_product_attention({_quote(Q, K, V, mask)})"
    if min(Q.ndim, K.ndim, V.ndim) < 2:
        raise ValueError(f"{call}: Q, K and V must be [..., length, features]")
    if Q.shape[-1] != K.shape[-1]:
        raise ValueError(f"{call}: Q and K must have the same d_k, their last axis")
    if K.shape[-2] != V.shape[-2]:
        raise ValueError(f"{call}: K and V must have the same length S, their last axis but one")
    try:
        scores = torch.broadcast_shapes(Q.shape[:-2], K.shape[:-2], V.shape[:-2])
    except RuntimeError:
        raise ValueError(f"{call}: the leading axes of Q, K and V do not broadcast") from None
    if mask is None:
        return
    if mask.dtype != torch.bool:
        raise ValueError(
            f"{call}: the mask must be bool, True where a query may attend, got {mask.dtype}"
        )
    wanted = (*scores, Q.shape[-2], K.shape[-2])
    try:
        fits = torch.broadcast_shapes(mask.shape, wanted) == wanted
    except RuntimeError:
        fits = False
    if not fits:
        raise ValueError(f"{call}: the mask must broadcast to [..., T, S] = {list(wanted)}")
