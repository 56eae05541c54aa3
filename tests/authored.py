"""Layers that others wrote for this, without having seen the checker, in many styles.

`authors/authors.tsv` says of each what is wrong with it and what the check says: `named` where the
first finding is of the rule that stands there, `caught` where something else is found wrong,
`missed` where nothing is; and `right` where nothing should be. What is missed is written down like
all else, so that it is seen when it changes.
"""

from __future__ import annotations

from pathlib import Path

from headwise.check import Verdict, check
from headwise.check.files.loading import chosen, load

HERE = Path(__file__).parent / "check" / "authors"
ROWS = [line.split("\t") for line in (HERE / "authors.tsv").read_text("utf-8").splitlines()]

MENDED = {
    "g12": {"e = e * adj.unsqueeze(-1)": "e = e.masked_fill(adj.unsqueeze(-1) == 0, -1e9)"},
    "g20": {
        "(self.k_lin(patches), n, length)": "(self.k_lin(patches), n, patches.shape[1])",
        "(self.v_lin(patches), n, length)": "(self.v_lin(patches), n, patches.shape[1])",
    },
    "h02": {
        "key_padding_mask=frame_mask": (
            "key_padding_mask=None if frame_mask is None else ~frame_mask"
        )
    },
    "h16": {"self.slopes * distance": "-self.slopes * distance"},
    "h28": {"rel[0] * 13": "rel[0] * (2 * window_size - 1)"},
    "g26": {"dropout=dropout)\n        self.linear1": "batch_first=True)\n        self.linear1"},
    "a04": {"context_position - memory_position": "memory_position - context_position"},
    "a07": {
        "[k_pe.expand(-1, -1, self.n_heads, -1), k_nope]": (
            "[k_nope, k_pe.expand(-1, -1, self.n_heads, -1)]"
        )
    },
    "a15": {"acc = acc + p @ vb": "acc = acc * correction + p @ vb"},
    "a21": {
        "self.pos_embeddings(q)": "self.pos_embeddings(q.transpose(1, 2)).transpose(1, 2)",
        "self.pos_embeddings(k)": "self.pos_embeddings(k.transpose(1, 2)).transpose(1, 2)",
    },
    "a27": {
        "        dots = self.pre_softmax_talk(dots)\n": "",
        "        mask_value =": "        dots = self.pre_softmax_talk(dots)\n        mask_value =",
    },
    "a31": {
        "        k = self.rope(k, 0)\n        new_kv = (k, v)\n": (
            "        new_kv = (k, v)\n        k = self.rope(k, 0)\n"
        )
    },
    "a35": {
        "k[:, :, : self.window], v[:, :, : self.window]": (
            "k[:, :, -self.window :], v[:, :, -self.window :]"
        )
    },
    "a43": {"(key_rot, query_pass)": "(key_rot, key_pass)"},
    "b01": {"attn_mask = key_padding_mask[:": "attn_mask = ~key_padding_mask[:"},
    "b05": {"<= n_frames": "< n_frames"},
    "b08": {".to(q.dtype)": ".bool()"},
    "b23": {"softmax(scores, dim=-1)": "softmax(scores, dim=1)"},
    "b31": {"(0, self.n_memory)": "(self.n_memory, 0)"},
    "b33": {"normalize(q) @ F.normalize(k)": "normalize(q, dim=-1) @ F.normalize(k, dim=-1)"},
    "b10": {
        "o = torch.roll(o, shifts=(-self.shift, -self.shift)": (
            "o = torch.roll(o, shifts=(self.shift, self.shift)"
        )
    },
    "b13": {"x.reshape(B, C, H, W)": "x.transpose(1, 2).reshape(B, C, H, W)"},
    "b40": {"freqs.repeat_interleave(2, dim=-1)": "torch.cat((freqs, freqs), dim=-1)"},
    "c01": {
        "y = torch.roll(y, shifts=(-self.shift, -self.shift)": (
            "y = torch.roll(y, shifts=(self.shift, self.shift)"
        )
    },
    "c02": {"c -> b (ph nh) (pw nw) c": "c -> b (nh ph) (nw pw) c"},
    "c03": {"reshape(B, W, H, C).permute(0, 3, 1, 2)": "reshape(B, W, H, C).permute(0, 3, 2, 1)"},
    "c04": {"dy * win + dx": "dy * (2 * win - 1) + dx"},
    "c06": {"x.reshape(B, C, H, W)": "x.transpose(1, 2).reshape(B, C, H, W)"},
    "c07": {
        "row_w, col_w = weight[..., :w], weight[..., w:]": (
            "col_w, row_w = weight[..., :h], weight[..., h:]"
        )
    },
    "c08": {"mask * self.NEG": "(1 - mask) * self.NEG"},
    "c15": {"(back > left) & (back < -right)": "(back > left) | (back < -right)"},
    "c17": {"x[:, :, :-1]": "x[:, :, 1:]"},
    "c21": {"masked_fill(~clicked, 0.0)": "masked_fill(~clicked, -1e9)"},
    "d01": {"1e-9)": "-1e9)"},
    "d07": {"(1.0 - mask) * -10000.0": "mask * -10000.0"},
    "d08": {"acc = acc + p @ vb": "acc = acc * fix + p @ vb"},
    "d11": {
        "alpha = torch.exp(energy)": "alpha = torch.exp(energy) * mask",
        "        alpha = alpha * mask\n": "",
    },
    "d12": {"return attentional, align": "return attentional, weights"},
    "d15": {"is_prompt.unsqueeze(2)": "is_prompt.unsqueeze(1)"},
    "d16": {
        "local = (causal & (back < self.window))[None, None]": (
            "local = (causal & same_doc & (back < self.window))[:, None]"
        )
    },
    "d29": {"view(B, 1, L, 1)": "view(B, 1, 1, L)"},
}
"""What mends a layer: with it nothing may be found any more."""


def checked(path: Path) -> Verdict | None:
    """The verdict; None where it asks how the layer is called."""
    try:
        return check(chosen(load(path), path, None))
    except ValueError:
        return None


def first_words(status: str, rule: str, file: str) -> tuple[str, Verdict | None]:
    """What the check says of a layer, in the words of the table, and the verdict."""
    verdict = checked(HERE / f"{file}.py")
    first = verdict.errors[0].rule if verdict is not None and verdict.errors else ""
    told = "named" if first and first == rule else "caught" if first else "missed"
    return "right" if (status, told) == ("right", "missed") else told, verdict
