"""`F.multi_head_attention_forward` and what `nn.MultiheadAttention` makes of it in evaluation.

The composite function is run by a twin of it that does not ask for function modes itself, so that
the attention inside is seen as it is made. In evaluation PyTorch takes fused layers, of which
nothing inside can be seen: they run as they are, and q, k and v are computed a second time.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from ...core.shapes import Extent
from ..call import HeadsCall
from ..heads import Composite, inside, unasked
from ..mask_import import as_mask, without_padding
from ..net import Net, Road
from ..private_torch import parameters
from .nested import nested_like, padded

_FORWARD: Any = F.multi_head_attention_forward


def multi_head_attention_forward(
    net: Net, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """The composite function; its `scaled_dot_product_attention` or softmax tells of the heads."""
    named = dict(zip(_NAMES, args, strict=False)) | kwargs
    extra = (named["bias_k"] is not None) + bool(named["add_zero_attn"])
    own = named["query"] is named["key"]
    of = Composite(named["num_heads"], own, extra, named["out_proj_weight"])
    with inside(of), net.functions:
        return unasked(_FORWARD)(*args, **kwargs)


_NAMES = parameters(_FORWARD)


# ── fused layers ────────────────────────────────────────────────────────────────────────────────


def native_multi_head_attention(
    net: Net, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """`torch._native_multi_head_attention`: what `nn.MultiheadAttention` is in evaluation."""
    asked = _attention(*args, **kwargs)
    out, weights = function(*args, **kwargs)
    given = [asked[name] for name in ("query", "key", "value")]
    own = given[0] is given[1]
    query, allowed = _wide(given[0], asked["mask"], asked["mask_type"])
    key, value = (query if x is given[0] else x for x in given[1:])
    weight, bias = asked["qkv_weight"], asked["qkv_bias"]
    heads = _Fused(query, key, value, asked["num_head"], weight, bias, allowed, own)
    new = heads.tell(net, net.names.current, out, asked["proj_weight"], "multi_head_attention")
    if new is None:
        return out, weights
    made = _projected(new, asked["proj_weight"], asked["proj_bias"])
    made = nested_like(made, out) if out.is_nested else made
    _REPLACED[made] = new
    return made, weights


def transformer_encoder_layer(
    net: Net, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """`torch._transformer_encoder_layer_fwd`: what `nn.TransformerEncoderLayer` is then."""
    asked = _layer(*args, **kwargs)
    out = function(*args, **kwargs)
    src, allowed = _wide(asked["src"], asked["mask"], asked["mask_type"])

    def norm(x: Tensor, number: int) -> Tensor:
        weight, bias = asked[f"norm_weight_{number}"], asked[f"norm_bias_{number}"]
        return F.layer_norm(x, weight.shape, weight, bias, asked["eps"])

    first = asked["norm_first"]
    x = norm(src, 1) if first else src
    weight, bias = asked["qkv_weight"], asked["qkv_bias"]
    heads = _Fused(x, x, x, asked["num_heads"], weight, bias, allowed, own=True)
    name = ".".join(part for part in (net.names.current, "self_attn") if part)
    new = heads.tell(net, name, out, asked["proj_weight"], "transformer_encoder_layer")
    if new is None:
        return out
    x = src + _projected(new, asked["proj_weight"], asked["proj_bias"])
    x = x if first else norm(x, 1)
    y = F.linear(norm(x, 2) if first else x, asked["ffn_weight_1"], asked["ffn_bias_1"])
    y = F.gelu(y) if asked["use_gelu"] else F.relu(y)
    x = x + F.linear(y, asked["ffn_weight_2"], asked["ffn_bias_2"])
    x = x if first else norm(x, 2)
    made = nested_like(x, out) if out.is_nested else x
    _REPLACED[made] = new
    return made


def _wide(x: Tensor, mask: Tensor | None, mask_type: int | None) -> tuple[Tensor, Tensor | None]:
    """The input of a fused layer `[B, T, E]`, and who may attend: whatever is 0 in the mask."""
    if x.is_nested:
        x, lengths = padded(x)
        allowed = torch.arange(x.shape[1], device=x.device) < lengths[:, None]
    elif mask is None:
        return x, None
    else:
        allowed = ~mask.bool()
        if mask_type != 1:  # [T, S] or [B, H, T, S]
            return x, allowed
    return x, allowed[:, None, None]


def _projected(heads: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Heads `[B, H, T, D]` through the output projection."""
    return F.linear(heads.transpose(1, 2).flatten(2), weight, bias)


_REPLACED = WeakIdKeyDictionary()
"""Of outputs of fused layers, the heads' outputs that somebody has put in the place of their own:
for those that listen within."""


class _Fused:
    """The heads of a fused layer; their outputs are computed when somebody asks."""

    def __init__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        heads: int,
        weight: Tensor,
        bias: Tensor,
        allowed: Tensor | None,
        own: bool,
    ) -> None:
        self.allowed, self.own, self.heads = allowed, own, heads
        (w_q, w_k, w_v), (b_q, b_k, b_v) = weight.chunk(3), bias.chunk(3)
        self.q, self.k = self._split(query, w_q, b_q), self._split(key, w_k, b_k)
        self.value = value, w_v, b_v

    def _split(self, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.linear(x, weight, bias).unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def out(self) -> Tensor:
        """The heads' outputs."""
        v = self._split(*self.value)
        return F.scaled_dot_product_attention(self.q, self.k, v, self.allowed)

    def tell(self, net: Net, name: str, out: Tensor, projection: Tensor, road: str) -> Any:
        """Tell of the heads; `out` is what the layer made of them."""
        (batch, heads, queries, _), keys = self.q.shape, self.k.shape[2]
        extent = Extent(batch, heads, heads, queries, keys)
        mask = as_mask(self.allowed, extent)
        if self.own:
            mask = without_padding(mask, extent, self.q.device)
        made: Any = _REPLACED.get(out, self.out)
        call = HeadsCall(
            name,
            road,
            self.q,
            self.k,
            self.k,
            made,  # no statistic reads the values
            keywords={"mask": mask},
            projection=projection,
            own_positions=False,  # the mask has seen to that
        )
        return net.tell(call)


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim: int,
    num_head: int,
    qkv_weight: Tensor,
    qkv_bias: Tensor,
    proj_weight: Tensor,
    proj_bias: Tensor,
    mask: Tensor | None = None,
    need_weights: bool = True,
    average_attn_weights: bool = True,
    mask_type: int | None = None,
) -> dict[str, Any]:
    """The arguments by name."""
    return locals()


def _layer(
    src: Tensor,
    embed_dim: int,
    num_heads: int,
    qkv_weight: Tensor,
    qkv_bias: Tensor,
    proj_weight: Tensor,
    proj_bias: Tensor,
    use_gelu: bool,
    norm_first: bool,
    eps: float,
    norm_weight_1: Tensor,
    norm_bias_1: Tensor,
    norm_weight_2: Tensor,
    norm_bias_2: Tensor,
    ffn_weight_1: Tensor,
    ffn_bias_1: Tensor,
    ffn_weight_2: Tensor,
    ffn_bias_2: Tensor,
    mask: Tensor | None = None,
    mask_type: int | None = None,
) -> dict[str, Any]:
    """The arguments by name."""
    return locals()


def functions() -> dict[Any, Road]:
    """The functions of this file."""
    return {
        _FORWARD: multi_head_attention_forward,
        vars(torch)["_native_multi_head_attention"]: native_multi_head_attention,
        vars(torch)["_transformer_encoder_layer_fwd"]: transformer_encoder_layer,
    }
