"""`accelerate(model)`: headwise's kernel under a model's attention, without editing it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from torch import nn

from ..layers.attention import MultiHeadAttention
from .adapters.compiled import COMPILER, refuse_compiled
from .adapters.mha import functions as composite_functions
from .adapters.sdpa import accelerated
from .adapters.sdpa import functions as fused_attention
from .modules import check_model
from .private_torch import compiler
from .serve import SERVED, Accelerated, Accelerator
from .session import ALWAYS, UNNOTICED


@contextmanager
def accelerate(model: nn.Module) -> Iterator[Accelerated]:
    """Run a model's attention on headwise's kernel; its numbers stay the same but for rounding.

    Serves `F.scaled_dot_product_attention`, `nn.MultiheadAttention` and PyTorch's transformer
    layers (the fused ones of evaluation too), in training and in evaluation, under autocast, and
    with `watch()` around it or inside: then statistics and output come from the same pass. A call
    is served where `attend()` would choose the native kernel, which was measured beside PyTorch's;
    every other one goes on as before, and the account says why. On exit, also after an exception,
    everything is as it was. Calls in the thread that accelerates are served.

    On CUDA this is for models that are watched: one launch computes output and statistics, where
    `watch()` alone launches twice. Rows whose scores are not finite numbers become NaN there.

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
    refuse_compiled("accelerate", model)

    def elsewhere(_: nn.Module) -> None:
        account.note("", "forward", "the model was called in another thread")

    roads = ALWAYS | fused_attention(accelerated) | composite_functions()
    net = Accelerator("accelerate", model, lambda call: None, roads, ALWAYS, elsewhere=elsewhere)
    net.account = account
    following, serving = net.names.following(), SERVED.heard_by(net)
    codes = nullcontext() if compiler() is None else COMPILER.heard_by(net)
    with following, UNNOTICED.heard_by(net), codes, serving, net.functions.on():
        yield account
