"""`accelerate(model)`: headwise's kernel under a model's attention, without editing it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from ..layers.attention import MultiHeadAttention
from .modules import check_model
from .serve import Account
from .session import served


class Accelerated(Account):
    """An account of the attention calls of a model: which headwise served, and why not the others.

    >>> account = Accelerated()
    >>> account.note("decoder.attn", "scaled_dot_product_attention", "nested tensors")
    >>> account.served, account.left
    (0, 1)
    >>> print(account)
      decoder.attn  scaled_dot_product_attention  1 ×  as before: nested tensors
    """

    def __init__(self, own_layers: int = 0) -> None:
        super().__init__()
        self._own_layers = own_layers

    @property
    def served(self) -> int:
        """How many calls headwise computed."""
        return sum(row["calls"] for row in self.table() if row["backend"])

    @property
    def left(self) -> int:
        """How many calls went on as before."""
        return sum(row["calls"] for row in self.table() if not row["backend"])

    def table(self) -> list[dict[str, Any]]:
        """A row for each module, function, and what was made of its calls.

        `layer`, `function`, `calls`; `backend` is that of headwise which served them, or `None`,
        and then `reason` says why they went on as before.
        """
        return [
            {
                "layer": layer,
                "function": function,
                "calls": calls,
                "backend": backend,
                "reason": reason,
            }
            for (layer, function, backend, reason), calls in list(self.calls.items())
        ]

    def __str__(self) -> str:
        rows = self.table()
        wide = [max((len(row[name]) for row in rows), default=0) for name in ("layer", "function")]
        lines = []
        for row in rows:
            arrow, how = " ", f"as before: {row['reason']}"
            if row["backend"]:
                arrow, how = "→", f"served by {row['backend']}"
            who = f"{row['layer']:{wide[0]}}  {row['function']:{wide[1]}}"
            lines.append(f"{arrow} {who}  {row['calls']} ×  {how}")
        if not lines:
            lines = [
                "no call of scaled_dot_product_attention or nn.MultiheadAttention was seen "
                "(those in compiled code are not)"
            ]
        if self._own_layers:
            lines.append(
                f"{self._own_layers} layers are headwise's own MultiHeadAttention, which chooses "
                f"its kernel by itself"
            )
        return "\n".join(lines)


@contextmanager
def accelerate(model: nn.Module) -> Iterator[Accelerated]:
    """Run a model's attention on headwise's CPU kernel; its numbers stay the same but for rounding.

    Serves `F.scaled_dot_product_attention`, `nn.MultiheadAttention` and PyTorch's transformer
    layers (the fused ones of evaluation too), in training and in evaluation, under autocast, and
    with `watch()` around it or inside: then statistics and output come from the same pass. A call
    is served where `attend()` would choose the native kernel, which was measured beside PyTorch's;
    every other one goes on as before, and the account says why. On exit, also after an exception,
    everything is as it was. Calls in the thread that accelerates are served.

    Run the backward pass of checkpointed activations inside too: it computes them again.

    Args:
        model: any module that is not compiled.

    Yields:
        An account, for `print()`, with `table()`, `served` and `left`.

    Raises:
        ValueError: something that is no module; a model that is compiled, or a part that is.

    >>> import torch, headwise as hw
    >>> layer = torch.nn.TransformerEncoderLayer(24, nhead=2, batch_first=True).eval()
    >>> x = torch.randn(2, 7, 24)
    >>> with torch.no_grad(), hw.accelerate(layer) as account:
    ...     out = layer(x)
    >>> account.served + account.left
    1
    >>> with torch.no_grad():
    ...     torch.testing.assert_close(out, layer(x))
    """
    check_model("accelerate", model)
    own = sum(isinstance(module, MultiHeadAttention) for module in model.modules())
    account = Accelerated(own)
    with served(model, account):
        yield account
