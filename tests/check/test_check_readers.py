"""Readers of single lines: what they say of a mistake, and nothing of the same put right."""

from __future__ import annotations

import textwrap

import pytest
from torch import nn

from headwise.check.diagnosis.read_blocks import (
    added_to_itself,
    fused_undropped,
    never_handed_on,
)
from headwise.check.diagnosis.read_built import (
    gpu_by_default,
    inner_forward,
    listed_layers,
    made_anew,
    misspelt,
    multiplied_none,
    no_bias,
    on_a_gpu,
    refused_default,
)
from headwise.check.diagnosis.read_caches import (
    first_alone,
    misaligned,
    stored_astray,
    turned_from_start,
)
from headwise.check.diagnosis.read_code import (
    either_tensor,
    never_read,
    no_methods,
    own_words,
    turned_values,
    unread_turns,
)
from headwise.check.diagnosis.read_ends import breakpoints, fixed_tokens, returns_input
from headwise.check.diagnosis.read_maps import projected_maps, regions_astray, unfolded_otherwise
from headwise.check.diagnosis.read_masks import (
    flat_masks,
    no_booleans,
    of_queries_alone,
    own_masks_by_fused,
    small_fills,
    tiled_masks,
)
from headwise.check.diagnosis.read_pieces import Reader
from headwise.check.diagnosis.read_roles import copied_lines, own_products
from headwise.check.diagnosis.read_roots import inverse_roots, scaled_biases, whole_roots
from headwise.check.diagnosis.read_sizes import (
    fused_merges,
    read_on,
    split_on,
    summed_apart,
    viewed_heads,
)
from headwise.check.diagnosis.read_softmax import (
    log_weights,
    said_axes,
    single_numbers,
    unsaid_axes,
)
from headwise.check.files.syntax import Source

Filling = str | tuple[str, ...]


def filled(code: str, parts: Filling) -> str:
    return code.format(*((parts,) if isinstance(parts, str) else parts))


def said(reader: Reader, code: str) -> list[str]:
    """The ways in which a class breaks its rule."""
    source = Source(textwrap.dedent(code), "layer.py")
    return [way for way, _, _ in reader(source.tree.body[-1], source, {})]


ADDED = """
class Block(nn.Module):
    def forward(self, x, mask):
        {0} = self.attention(self.norm(x), mask)
        x = x + self.dropout({0})
        return self.last(x)
"""
STACK = """
class Encoder(nn.Module):
    {1}
    def forward(self, x, mask):
        for layer in self.layers:
            {0} = layer(x, mask)
        return self.norm({0})
"""
FORKED = """
class Layer(nn.Module):
    def forward(self, q, k, v):
        if self.fused:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True{0})
        else:
            att = self.weights(q, k)
            att = self.{1}(att)
            y = att @ v
        return y
"""
SUBTRACTED = """
class Layer(nn.Module):
    def forward(self, q, k, v, mask):
        scores = (q @ k.mT).masked_fill({0}, -1e9)
        return scores.softmax(-1) @ v
"""
LEFT_OUT = """
class Layer(nn.Module):
    def __init__(self, dim, heads, head_dim=None):
        super().__init__()
        {0}
        self.head_dim = head_dim
        self.q = nn.Linear(dim, heads * self.head_dim)
"""
APPENDED = """
class Decoder(nn.Module):
    def __init__(self, dim, layers):
        super().__init__()
        self.layers = []
        for n in range(layers):
            layer = nn.Linear(dim, dim)
            self.layers.append(layer)
        {0}
"""
STOPS = """
class Layer(nn.Module):
    def forward(self, x):
        {0}
        return self.attend(x)
"""
LOGS = """
class Layer(nn.Module):
    def forward(self, q, k, v):
        attn = F.{0}(q @ k.mT, dim=-1)
        {1}
        return attn @ v
"""
LAID = """
class Layer(nn.Module):
    def forward(self, q, k, v, mask):
        sim = torch.einsum('b h i d, b h j d -> b h i j', q, k)
        sim = sim.masked_fill(~mask[{0}], -1e9)
        sim = sim.masked_fill(self.later, -1e9)
        return sim.softmax(dim=-1) @ v
"""
DEFAULT = """
class Layer(nn.Module):
    def __init__(self, mode="{0}"):
        assert mode in ("self", "memory")
        self.mode = mode
"""
RETURNED = """
class Layer(nn.Module):
    def forward(self, h, mask):
        x = self.attend(h, mask)
        out = self.norm(x + h)
        return {0}
"""
MASKED = """
class Layer(nn.Module):
    def forward(self, q, k, v, mask):
        logits = q @ k.mT
        if mask is not None:
            {0} = hide(logits, mask)
        return logits.softmax(-1) @ v
"""
SPLIT = """
class Layer(nn.Module):
    def forward(self, x):
        q = self.q(x).view(batch, nodes, self.n_heads, -1)
        return self.attend(q.{0})
"""
FUSED = """
class Layer(nn.Module):
    def forward(self, x):
        b, t, e = x.shape
        q, k, v = (one.view(b, t, self.heads, -1).transpose(1, 2) for one in self.three(x))
        out = F.scaled_dot_product_attention(q, k, v){0}.reshape(b, t, e)
        return out
"""
ROOT = """
class Layer(nn.Module):
    def __init__(self, dim):
        self.scale = self.head_dim ** -0.5

    def forward(self, x):
        scores = self.q(x) @ self.k(x).mT
        return (scores {0} self.scale).softmax(-1)
"""
HANDED = """
class Layer(nn.Module):
    def forward(self, q, k, v):
        scores = torch.matmul(q, k.permute(0, 1, 3, 2)) / math.sqrt({0})
        out = torch.matmul(scores.softmax(-1), v).permute(0, 2, 1, 3)
        return out.reshape(q.shape[0], q.shape[2], self.d_model)
"""
TURNED = """
class Layer(nn.Module):
    def forward(self, x):
        q, k, v = self.three(x)
        {0}
        return self.attend(q, k, v)
"""
TABLE = """
class Layer(nn.Module):
    def forward(self, x):
        query, key = self.q(x), self.k(x)
        {0}
        out = self.attend(query, key, self.v(x))
        query, key = self.rope(query), self.rope(key)
        print(query.shape, key.shape)
        return {1}
"""
ROLLED = """
class Layer(nn.Module):
    def forward(self, x):
        x = torch.roll(x, (-2, -2), (1, 2))
        out = self.attend(x)
        {0} = torch.roll({0}, (2, 2), (1, 2))
        return out
"""
KEPT = """
class Layer(nn.Module):
    def forward(self, x, start_pos):
        self.cache_k[{0}start_pos : start_pos + t] = self.k(x)
        keys = self.cache_k[:b, : start_pos + t]
        return keys
"""
WINDOW = """
class Layer(nn.Module):
    def forward(self, x, kv_cache=None):
        q, k, v = self.three(x)
        if kv_cache is not None:
            past_k, past_v = kv_cache
            k = torch.cat([past_k, k], dim=2)
            v = torch.cat([past_v, v], dim=2)
        scores = q @ k.mT
        _, _, q_len, kv_len = scores.shape
        if kv_len > self.sliding_window:
            far = torch.tril(torch.ones(q_len, kv_len), diagonal={0})
            scores = scores.masked_fill(far.bool(), -math.inf)
        return scores.softmax(-1) @ v
"""
PROJECTED = """
class Layer(nn.Module):
    def __init__(self, channels):
        self.proj = nn.Linear(self.inner, channels)

    def forward(self, x):
        out = x.view(b, n, self.heads * self.d)
        return self.proj(out){0}.view(b, {1})
"""
UNFOLDED = """
class Layer(nn.Module):
    def forward(self, x):
        area = self.k * self.k
        parts = F.unfold(self.key(x), self.k)
        return parts.permute(0, 2, 1).reshape(b, h, w, {0})
"""
REGIONS = """
class Layer(nn.Module):
    def regions(self, size):
        mask = torch.zeros(({0}))
        for h in slices:
            for w in slices:
                mask[:, h, w, :] = number
"""
FOLDED = """
class Layer(nn.Module):
    def forward(self, x, lengths):
        q = self.q(x).view(b, t, self.h, d).transpose(1, 2).reshape(b * self.h, t, d)
        pad = (torch.arange(t) >= lengths[:, None]).unsqueeze(1)
        return q, pad.{0}
"""
WRITTEN = """
class Layer(nn.Module):
    def forward(self, hidden, outputs):
        scores = self.v(torch.tanh(outputs)).squeeze(2)
        # scores = [src len, batch size]
        scores = scores.masked_fill(hidden == 0, -1e9)
        return F.softmax(scores, dim={0})
"""
MADE = """
class Layer(nn.Module):
    def {0}(self, x):
        {1}
        return self.Q(x)
"""
ANEW = "self.Q = nn.Linear(8, 8)"
RIGHT_TURN = "q, k = map(lambda t: apply_rotary(positions, t), (q, k))"
WRONG_TURN = "q, k, v = map(lambda t: apply_rotary(positions, t), (q, k, v))"
BIAS = "class Layer:\n    def forward(self, q, k):\n        "
BIAS += "return torch.baddbmm(alibi, q, k, beta={0}, alpha=self.scale)"
EINSUM = "class Layer:\n    def forward(self, q):\n        return torch.einsum('{0}', q, self.r)"


SCORED = """
class Layer(nn.Module):
    def __init__(self, dim):
        self.score = nn.Linear(dim, 1)

    def forward(self, x):
        scores = self.score(x)
        return (F.softmax(scores, dim={0}) * x).sum(1)
"""
BUILT = """
class Layer(nn.Module):
    def {0}(self, dim):
        self.q = nn.Linear(dim, dim)
"""


HANDED_OVER = """
class GPT(nn.Module):
    def forward(self, x):
        mask = torch.tril(torch.ones(t, t, device=x.device)){0}
        return self.attend(x, mask)

class Layer(nn.Module):
    def forward(self, x, mask=None):
        seen = {1}
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
"""
FILLS = """
class Layer(nn.Module):
    def forward(self, scores, mask):
        return scores.masked_fill(mask == 0, float("{0}")).softmax(-1)
"""
LINEAR = """
class Layer(nn.Module):
    def __init__(self, dim, qkv_bias=False):
        self.qkv = nn.Linear(dim, 3 * dim, bias={0})
"""
WRITTEN_DOWN = """
class Layer(nn.Module):
    def forward(self, x):
        b, t, _ = x.shape
        return self.q(x).reshape(b, {0}, 3, 16).transpose(1, 2)
"""
FIRST = """
class Layer(nn.Module):
    def forward(self, x, past_key=None, past_value=None):
        q, k, v = self.qkv(x)
        if past_key is not None:
            k, v = torch.cat((past_key, k), 2), torch.cat((past_value, v), 2)
        return F.scaled_dot_product_attention(q, k, v, is_causal={0})
"""
TURNS = """
class Layer(nn.Module):
    def forward(self, x, cache=None):
        b, t, _ = x.shape
        cos, sin = self.cos[{0}], self.sin[{0}]
        return self.attend(x, cos, sin, cache)
"""
BUILTIN = """
class Layer(nn.Module):
    def forward(self, x):
        return self.w(x) if {0} == "general" else x
"""
KEPT_DEVICE = """
class Layer(nn.Module):
    def __init__(self, dim, device="cuda:0"):
        self.device = device

    def forward(self, x):
        return x + torch.zeros(x.shape[1], 1).to({0}.device)
"""
OWN = """
class Layer(nn.Module):
    def scores(self, query, keys):
        return torch.bmm(query, {0}.transpose(1, 2))
"""
EITHER = """
class Layer(nn.Module):
    def forward(self, query, keys, values=None):
        values = {0}
        return query @ keys.mT @ values
"""
INNER = """class Layer(nn.Module):
    def __init__(self):
        super().__init__()
    {0}def forward(self): ...
"""
NORMED = """
class Layer(nn.Module):
    def forward(self, x):
        q, k = self.q(x), self.k(x)
        q = self.norm(q, 1e-6)
        k = self.norm({0}, 1e-6)
        return self.attend(q, k, self.v(x))
"""
UNSAID = """
class Layer(nn.Module):
    def forward(self, x, keys):
        scores = torch.bmm(keys, x.unsqueeze(2)){0}
        return F.softmax(scores)
"""
ON_A_GPU = """
class Layer(nn.Module):
    def __init__(self, dim):
        self.attention = nn.MultiheadAttention(dim, 3){0}
"""
BY_HEADS = """
class Layer(nn.Module):
    def __init__(self, dim, num_heads):
        self.q = nn.Linear(dim, dim)

    def forward(self, x):
        query = self.q(x){0}
        return query.view(batch * num_heads, -1, width)
"""


@pytest.mark.parametrize(
    ("reader", "code", "wrong", "right"),
    [
        (own_masks_by_fused, HANDED_OVER, ("", "mask == 0"), (".bool()", "mask == 0")),
        (own_masks_by_fused, HANDED_OVER, ("", "mask == 0"), ("", "mask == 1")),
        (small_fills, FILLS, "-1e-9", "-1e9"),
        (first_alone, FIRST, "True", "past_key is None"),
        (turned_from_start, TURNS, ":t", "cache.length : cache.length + t"),
        (own_words, BUILTIN, "type", "self.type"),
        (own_products, OWN, "query", "keys"),
        (copied_lines, NORMED, "q", "k"),
        (either_tensor, EITHER, "values or keys", "keys if values is None else values"),
        (on_a_gpu, ON_A_GPU, ".cuda(2)", ""),
        (gpu_by_default, KEPT_DEVICE, "self", "x"),
        (no_bias, LINEAR, "False if qkv_bias is False else None", "qkv_bias"),
        (fixed_tokens, WRITTEN_DOWN, "50", "t"),
        (viewed_heads, BY_HEADS, "", ".view(batch, -1, num_heads, width).transpose(1, 2)"),
        (split_on, SPLIT, "reshape(batch, self.n_heads, nodes, -1)", "transpose(1, 2)"),
        (read_on, SPLIT, "view(batch, self.n_heads, -1, nodes)", "permute(0, 2, 3, 1)"),
        (fused_merges, FUSED, ".contiguous()", ".transpose(1, 2)"),
        (inverse_roots, ROOT, "/", "*"),
        (whole_roots, HANDED, "self.d_model", "self.d_k"),
        (turned_values, TURNED, WRONG_TURN, RIGHT_TURN),
        (turned_values, TURNED, "v = self.rotary(v)", "v = self.drop(v)"),
        (never_read, ROLLED, "x", "out"),
        (stored_astray, KEPT, "", ":b, "),
        (misaligned, WINDOW, "-self.sliding_window", "kv_len - q_len - self.sliding_window"),
        (projected_maps, PROJECTED, ("", "channels, h, w"), (".mT", "channels, h, w")),
        (projected_maps, PROJECTED, ("", "channels, h, w"), ("", "h, w, channels")),
        (unfolded_otherwise, UNFOLDED, "area, -1", "-1, area"),
        (regions_astray, REGIONS, "1, 1, H, W", "1, H, W, 1"),
        (tiled_masks, FOLDED, "repeat(self.h, 1, 1)", "repeat_interleave(self.h, 0)"),
        (said_axes, WRITTEN, "1", "0"),
        (unsaid_axes, UNSAID, "", ".squeeze(2)"),
        (made_anew, MADE, ("forward", ANEW), ("__init__", ANEW)),
        (made_anew, MADE, ("forward", ANEW), ("forward", f"if self.Q is None: {ANEW}")),
        (scaled_biases, BIAS, "self.scale", "1.0"),
        (breakpoints, STOPS, "import ipdb; ipdb.set_trace()", "if self.debug: breakpoint()"),
        (breakpoints, STOPS, "breakpoint()", "self.log.breakpoint()"),
        (log_weights, LOGS, ("log_softmax", "pass"), ("log_softmax", "attn = attn.exp()")),
        (log_weights, LOGS, ("log_softmax", "pass"), ("softmax", "pass")),
        (of_queries_alone, LAID, ":, None, :, None", ":, None, None, :"),
        (flat_masks, LAID, ":, None, :", ":, None"),
        (refused_default, DEFAULT, "self_attention", "self"),
        (returns_input, RETURNED, "h", "out"),
        (never_read, MASKED, "mask", "logits"),
        (added_to_itself, ADDED, "x", "out"),
        (never_handed_on, STACK, ("out", ""), ("x", "")),
        (never_handed_on, STACK, ("out", ""), ("out", "@capture")),
        (fused_undropped, FORKED, ("", "drop"), (", dropout_p=p", "drop")),
        (fused_undropped, FORKED, ("", "drop"), ("", "norm")),
        (no_booleans, SUBTRACTED, "1 - mask", "mask == 0"),
        (no_booleans, SUBTRACTED, "1 - mask[:, None]", "1 - mask.bool()"),
        (multiplied_none, LEFT_OUT, "", "head_dim = head_dim or dim // heads"),
        (multiplied_none, LEFT_OUT, "", "if head_dim is None: head_dim = dim // heads"),
        (listed_layers, APPENDED, "", "self.layers = nn.ModuleList(self.layers)"),
        (listed_layers, APPENDED, "", "self.add_module('last', layer)"),
        (summed_apart, EINSUM, "bhxydz,cij->bhxyij", "bhxydz,dij->bhxyij"),
    ],
    ids=lambda one: getattr(one, "__name__", "-"),
)  # fmt: skip
def test_a_line(reader: Reader, code: str, wrong: Filling, right: Filling) -> None:
    assert said(reader, filled(code, wrong))
    assert not said(reader, filled(code, right))


def test_numbers_that_are_added_for_a_mask() -> None:
    code = HANDED_OVER.replace("seen = {1}", "").replace("=seen", "=mask")
    assert said(own_masks_by_fused, code.format("")) == ["numbers"]
    assert said(own_masks_by_fused, code.format(" == 1")) == []


def test_rotations_that_nothing_reads() -> None:
    early = "query, key = self.rope(query), self.rope(key)"
    assert said(unread_turns, filled(TABLE, ("pass", "out"))) == ["unread", "unread"]
    assert not said(unread_turns, filled(TABLE, (early, "out, query, key")))


def test_a_softmax_of_one_number() -> None:
    assert said(single_numbers, filled(SCORED, "-1")) == ["number"]
    assert not said(single_numbers, filled(SCORED, "1"))


def test_a_constructor_that_nothing_calls() -> None:
    assert said(misspelt, filled(BUILT, "__int__")) == ["misspelt"]
    assert not said(misspelt, filled(BUILT, "__init__"))


def test_a_forward_inside_the_constructor() -> None:
    for ahead, ways in (("    ", [("inner", 4, {"name": "__init__"})]), ("", [])):
        code = filled(INNER, ahead)
        known, source = {"nn": nn}, Source(code, "layer.py")
        exec(code, known)
        assert [*inner_forward(source.tree.body[-1], source, known)] == ways


def test_words_that_are_kept_are_no_scores() -> None:
    code = "class Layer:\n    def forward(self, {0}):\n        return {0}.items()"
    assert said(no_methods, filled(code, "attn_weights")) == ["method"]
    assert not said(no_methods, filled(code, "attn_kwargs"))
