"""Layers in files of their own: texts that are loaded, and those that others wrote.

Others wrote `check/authors` without having seen the checker, in many styles. `authors.tsv` says of
each what the check says: `named` where the first finding is of the rule that stands there, `caught`
where something else is found wrong, `missed` where nothing is, `asked` where it asks for a call or
an argument, and `right` where nothing is found and nothing should be; then the rule that should be
named (`right` where it asks about a right one), the file, and what is wrong. What is missed is
written down like all else, so that it is seen when it changes.
"""

from __future__ import annotations

import importlib.util
import sys
from itertools import count
from pathlib import Path
from typing import Any

from headwise.check.files import chosen

HERE = Path(__file__).parent / "check" / "authors"
NUMBER = count()


def loaded(text: str, folder: Path, name: str | None = None) -> tuple[Any, dict[str, Any]]:
    """Return what is to be checked in a text, as if from a file of its own, and all its names."""
    path = folder / f"of_a_test_{next(NUMBER)}.py"
    path.write_text(text, "utf-8")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # where `inspect` looks for a class's file
    spec.loader.exec_module(module)
    return chosen(module, path, name), vars(module)


ROWS = [line.split("\t") for line in (HERE / "authors.tsv").read_text("utf-8").splitlines()]
MENDED = {
    "a05": {
        "view(N, self.heads, seq_len, self.head_dim)": (
            "view(N, seq_len, self.heads, self.head_dim).transpose(1, 2)"
        ),
        "torch.matmul(attention, values).view(": (
            "torch.matmul(attention, values).transpose(1, 2).reshape("
        ),
    },
    "a09": {
        "attn_mask=None": (
            "attn_mask=torch.ones(T, k.shape[2], dtype=torch.bool, device=x.device)"
            ".tril(k.shape[2] - T)"
        ),
        "            is_causal=True,\n": "",
    },
    "a10": {"padding=kernel_size // 2, ": "", "self.dconv(qkv)": "self.dconv(F.pad(qkv, (2, 0)))"},
    "a13": {"torch.ones(block_size, block_size)": "torch.ones(block_size, block_size), 1"},
    "a17": {
        "v[:, None].expand(B, self.r, G, T": "v[:, :, None].expand(B, G, self.r, T",
    },
    "a25": {"attn_mask=mask,": "attn_mask=mask.bool(),"},
    "a26": {"        q = q * self.scale\n": ""},
    "a32": {"F.normalize(q)": "F.normalize(q, dim=-1)", "F.normalize(k)": "F.normalize(k, dim=-1)"},
    "b31": {"(0, self.n_memory)": "(self.n_memory, 0)"},
    "b33": {"normalize(q) @ F.normalize(k)": "normalize(q, dim=-1) @ F.normalize(k, dim=-1)"},
    "b34": {
        "[nn.Linear(dim, 3 * d_head)] * n_heads": (
            "nn.Linear(dim, 3 * d_head) for _ in range(n_heads)"
        )
    },
    "e08": {
        "is_causal=q.shape[-2] > 1,   #": (
            "attn_mask=torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device)"
            ".tril(k.shape[-2] - q.shape[-2]),  #"
        )
    },
}
"""What mends a layer: with it nothing may be found any more."""
