"""`accelerate(model)`: run a model's attention on headwise's kernel without editing the model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from torch import nn

from ..layers.attention import MultiHeadAttention
from .adapters.compiled import COMPILER, refuse_compiled
from .adapters.mha import functions as composite_functions
from .adapters.sdpa import accelerated
from .adapters.sdpa import functions as fused_attention
from .catch import ALWAYS, UNNOTICED
from .modules import check_model
from .private_torch import compiler
from .serve import SERVED, Accelerated, Accelerator


@contextmanager
def accelerate(model: nn.Module) -> Iterator[Accelerated]:
    """Run a model's attention on headwise's kernel; results change only by rounding.

    It supports `F.scaled_dot_product_attention`, `nn.MultiheadAttention` and PyTorch's transformer
    layers (including the fused ones for evaluation), in training and evaluation, under autocast,
    and with `watch()` outside or inside it: statistics and output are then computed in one pass. A
    call is accelerated if `attend()` would choose the native kernel, based on measurements against
    PyTorch's kernel; other calls run unchanged, and the account states why. On exit, even after
    an exception, the model is restored. Only calls in the current thread are accelerated.

    On CUDA this is useful for watched models: one launch computes output and statistics, whereas
    `watch()` alone requires two. Rows with scores that are not finite become NaN on CUDA.

    With activation checkpointing, run the backward pass inside the `with` block too, because it
    recomputes attention.

    Args:
        model: any module that is not compiled.

    Yields:
        An account that can be printed and has `table()`, `served` and `left`.

    Raises:
        ValueError: the model is not a module, or it or a part of it is compiled.

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
    refuse_compiled("accelerate", model)

    def elsewhere(_: nn.Module) -> None:
        account.note("", "forward", "the model was called in another thread")

    interceptors = ALWAYS | fused_attention(accelerated) | composite_functions()
    net = Accelerator(
        "accelerate", model, lambda call: None, interceptors, ALWAYS, elsewhere=elsewhere
    )
    net.account = account
    following, serving = net.names.following(), SERVED.activate(net)
    codes = nullcontext() if compiler() is None else COMPILER.activate(net)
    with following, UNNOTICED.activate(net), codes, serving, net.functions.on():
        yield account
