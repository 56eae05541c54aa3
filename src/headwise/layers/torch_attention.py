"""A drop-in replacement for `nn.MultiheadAttention`."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..core import reference
from ..core.mask_algebra import Mask
from ..core.masks import Bias, Causal, Dense, as_mask
from .attention import MultiHeadAttention, fault_of_torch


def replace_attention_(model: nn.Module) -> tuple[str, ...]:
    """Replace every `nn.MultiheadAttention` in a model with headwise's layer.

    The new modules share the old parameters under the same names, so optimizers, tied weights and
    checkpoints stay valid. They take the same arguments, `(query, key, value, key_padding_mask,
    need_weights, attn_mask, average_attn_weights, is_causal)`, and return `(output, weights)`, so
    `nn.TransformerEncoder`, `nn.TransformerDecoder` and models of torchvision keep working.
    Attention runs in `hw.attend()`.

    Three results differ from PyTorch's: a query without a visible key gets weights 0, not NaN;
    returned weights are those before dropout; and PyTorch's fused encoder layers, which skip the
    attention module, are disabled, so padded positions of an encoder's output are not zeros.

    Returns:
        The names of the modules that were replaced.

    Raises:
        ValueError: the model has no such module, or is one itself; or a module uses `add_bias_kv`
            or `add_zero_attn`, is of a subclass, or has hooks. In that case, nothing is replaced.

    >>> encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(24, 4, batch_first=True), 2)
    >>> x = torch.randn(2, 7, 24)
    >>> before = encoder.eval()(x)
    >>> replace_attention_(encoder)
    ('layers.0.self_attn', 'layers.1.self_attn')
    >>> torch.allclose(encoder(x), before, atol=1e-5)
    True
    """
    call = f"replace_attention_({type(model).__name__})"
    if not isinstance(model, nn.Module):
        raise ValueError(f"{call}: give a model, an nn.Module.")
    if isinstance(model, nn.MultiheadAttention):
        hint = "hw.MultiHeadAttention.from_torch(…) builds a layer from it"
        raise ValueError(f"{call}: only modules inside a model are replaced; {hint}.")
    found: dict[str, nn.MultiheadAttention] = {
        name: module
        for name, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, nn.MultiheadAttention)
    }
    if not found:
        raise ValueError(f"{call}: it has no nn.MultiheadAttention.")
    for name, module in found.items():
        fault = fault_of_torch(module)
        if fault is None and (module._forward_hooks or module._forward_pre_hooks):
            fault = "it has forward hooks, which would be lost; remove them and add them afterwards"
        if fault is not None:
            raise ValueError(f"{call}: at {name!r}, {fault}.")
    built = {id(module): TorchMultiHeadAttention(module) for module in found.values()}
    for name, module in found.items():
        model.set_submodule(name, built[id(module)])
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = False
    return tuple(found)


class TorchMultiHeadAttention(MultiHeadAttention):
    """`MultiHeadAttention` with the parameters, arguments and results of `nn.MultiheadAttention`.

    Args:
        mha: the module; its parameters are shared.
    """

    bias_k = bias_v = None
    add_zero_attn = False
    in_proj_weight: Tensor | None
    in_proj_bias: Tensor | None
    out_proj: nn.Linear
    _qkv_same_embed_dim = False
    """PyTorch's encoder layers read it; if it is False, they call the module and do not fuse it."""

    def __init__(self, mha: nn.MultiheadAttention) -> None:
        bias = mha.in_proj_bias is not None
        super().__init__(mha.embed_dim, mha.num_heads, bias=bias, dropout=mha.dropout)
        self.kdim, self.vdim, self.batch_first = mha.kdim, mha.vdim, mha.batch_first
        for name, parameter in mha._parameters.items():
            self.register_parameter(name, parameter)
        self.out_proj = mha.out_proj
        self.train(mha.training)

    def _build(self, **factory: Any) -> None:
        """Create nothing: the parameters come from PyTorch's module."""

    def reset_parameters(self) -> None:
        """Reinitialize q, k, v and out by Xavier uniform, each separately, and biases to 0."""
        with torch.no_grad():
            weights = (*self._weights(), self.out_proj.weight) if self._parameters else ()
            for weight in weights:  # none while the layer is built
                nn.init.xavier_uniform_(weight)
            for name, parameter in self.named_parameters():
                if name.endswith("bias"):
                    nn.init.zeros_(parameter)

    def forward(  # type: ignore[override]
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend like `nn.MultiheadAttention`, with its arguments and masks (True masks a pair).

        Args:
            query: `[B, T, embed_dim]`, `[T, B, embed_dim]` without `batch_first`, or
                `[T, embed_dim]`; key and value likewise, with widths kdim and vdim.
            key_padding_mask: `[B, S]` or `[S]`, bool or float.
            need_weights: also return the weights; their matrix `[T, S]` per head is not built
                otherwise.
            attn_mask: `[T, S]` or `[B·num_heads, T, S]`, bool or float.
            average_attn_weights: return the mean of the weights over heads.
            is_causal: a hint that `attn_mask` is causal.

        Returns:
            The output, in the layout of query, and the weights `[B, T, S]` (`[B, H, T, S]` without
            averaging) or None.

        Raises:
            ValueError: shapes or masks do not fit, or `is_causal` is given without `attn_mask`.
        """
        batched, own = query.dim() == 3, key is query
        given = query, key, value
        if any(x.dim() != query.dim() or x.dim() not in (2, 3) for x in given):
            raise ValueError(
                self._fault(f"{[list(x.shape) for x in given]} must all be 2-D or 3-D")
            )
        if not batched:
            query, key, value = (x[None] for x in given)
        elif not self.batch_first:
            query, key, value = (x.transpose(0, 1) for x in given)
        widths = self.embed_dim, self.kdim, self.vdim
        if tuple(x.shape[-1] for x in (query, key, value)) != widths:
            raise ValueError(self._fault(f"query, key and value must have the widths {widths}"))
        mask = self._mask(query, key, key_padding_mask, attn_mask, is_causal)
        joined, bias = self.in_proj_weight, self.in_proj_bias
        if own and given[2] is given[0] and joined is not None:
            rows = F.linear(query, joined, bias).chunk(3, -1)
        else:
            biases = (None,) * 3 if bias is None else bias.chunk(3)
            parts = zip((query, key, value), self._weights(), biases, strict=True)
            rows = [F.linear(x, weight, bias) for x, weight, bias in parts]
        q, k, v = map(self._heads, rows)
        with self._observed(own, 0):
            out = self._merge(self._attend(q, k, v, mask))
        weights = None
        if need_weights:
            weights = reference.attention(q, k, v, mask=mask).weights.to(out.dtype)
            weights = weights.mean(1) if average_attn_weights else weights
        if not batched:
            return out[0], None if weights is None else weights[0]
        return out if self.batch_first else out.transpose(0, 1), weights

    def _mask(
        self,
        query: Tensor,
        key: Tensor,
        padding: Tensor | None,
        attn_mask: Tensor | None,
        is_causal: bool,
    ) -> Mask:
        """Return PyTorch's masks as one headwise mask."""
        (batch, queries), keys = query.shape[:2], key.shape[1]
        mask = as_mask(None)
        if attn_mask is None and is_causal:
            raise ValueError(self._fault("is_causal is a hint about attn_mask; give attn_mask too"))
        if attn_mask is not None:
            shape = tuple(attn_mask.shape)
            if shape not in ((queries, keys), (batch * self.num_heads, queries, keys)):
                raise ValueError(
                    self._fault(
                        f"attn_mask {list(shape)} must be {[queries, keys]} or "
                        f"{[batch * self.num_heads, queries, keys]}"
                    )
                )
            if len(shape) == 3:
                attn_mask = attn_mask.view(batch, self.num_heads, queries, keys)
            mask = Causal() if is_causal and queries == keys else self._shown(attn_mask)
        if padding is not None:
            if tuple(padding.shape) not in ((batch, keys), (keys,)):
                raise ValueError(
                    self._fault(f"key_padding_mask {list(padding.shape)} must be {[batch, keys]}")
                )
            mask &= self._shown(padding.view(batch, 1, 1, keys))
        return mask

    def _shown(self, hidden: Tensor) -> Mask:
        if hidden.dtype == torch.bool:
            return Dense(~hidden)
        if not hidden.is_floating_point():
            raise ValueError(self._fault(f"masks must be bool or float, got {hidden.dtype}"))
        return Bias(hidden)

    def _fault(self, fault: str) -> str:
        return f"{type(self).__name__}({self.extra_repr()}): {fault}"

    def _weights(self) -> tuple[Tensor, ...]:
        """The weights of q, k and v."""
        if self.in_proj_weight is not None:
            return self.in_proj_weight.chunk(3)
        return self.q_proj_weight, self.k_proj_weight, self.v_proj_weight  # type: ignore[return-value]

    @property
    def projection(self) -> Tensor:
        """Weight of the output projection, `[embed_dim, num_heads · head_dim]`."""
        return self.out_proj.weight

    def _merge(self, out: Tensor) -> Tensor:
        return self.out_proj(out.transpose(1, 2).flatten(2))
