"""`watch(model)`: statistics of every head of a model while it runs, without editing it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor, nn

from ..attend import check_statistics
from ..evidence import Statistic
from .calls import AttentionCall, Looking
from .catching import catch
from .names import chosen
from .seen import Watched


@contextmanager
def watch(
    model: nn.Module,
    *statistics: Statistic,
    queries: int | Sequence[int] | Tensor | None = None,
    seed: int = 0,
    running: bool = False,
    gradients: bool = False,
    modules: str | Callable[[str], bool] | None = None,
) -> Iterator[Watched]:
    """See every head of a model while it runs; its outputs stay bit for bit the same.

    Sees attention through `F.scaled_dot_product_attention`, `nn.MultiheadAttention` and PyTorch's
    transformer layers (the fused ones of evaluation too), `flex_attention`, `varlen_attn`, models
    of transformers under any `attn_implementation`, headwise's own layer, and a softmax over the
    last axis that values are multiplied with. Only the statistics are kept. On exit, also after an
    exception, everything is as it was. Calls in the thread that watches are seen.

    Where queries and keys are of one sequence, a key that no query may attend to is padding; the
    query at its position counts as one that may attend to nothing, and stays out of every mean.

    Args:
        model: any module.
        statistics: what to take of every call, such as `Entropy()`, `Mass(Previous())`.
        queries: look at so many queries of every call only, or at these, as in `observe()`.
        seed: of the draw.
        running: add calls up as they come (`Running`) in place of keeping each one's statistics:
            memory stays constant over a generation or a data set.
        gradients: keep the graph of LSE, entropy, distance and masses, so that they can stand in a
            loss, as in `observe()`; by default what is seen is detached.
        modules: only these: a pattern of qualified names such as `"encoder.*"`, or a function that
            says whether a name is meant; for statistics that fit some modules only.

    Raises:
        ValueError: a model that is compiled, or a part that is; `running` together with
            `gradients`; while the model runs, statistics that do not fit a call, with the name of
            the module.
        RuntimeError: the model is called in another thread, while the model runs.

    >>> import torch, headwise as hw
    >>> layer = torch.nn.TransformerEncoderLayer(24, nhead=2, batch_first=True).eval()
    >>> with hw.watch(layer, hw.Entropy()) as seen, torch.no_grad():
    ...     out = layer(torch.randn(2, 7, 24))
    >>> [(row["layer"], row["head"]) for row in seen.table()]
    [('self_attn', 0), ('self_attn', 1)]
    """
    kind = type(model).__name__
    if running and gradients:
        raise ValueError(
            f"watch({kind}, running=True, gradients=True): sums over calls have no gradient; watch "
            f"the calls of one loss without running."
        )
    check_statistics(statistics, "watch")
    looking, meant = Looking(queries, seed, gradients), chosen(modules)

    def listen(call: AttentionCall) -> None:
        # What a backward pass recomputes was counted before; only its graph must be as it was.
        if not meant(call.name) or (call.again and not gradients):
            return
        try:
            readings = call.observe(statistics, looking)
        except ValueError as error:
            raise ValueError(
                f"watch({kind}, …): in {call.name!r} (queries {call.queries}, keys {call.keys}): "
                f"{error} To leave a module out, give modules=…, such as modules='encoder.*'."
            ) from error
        if not call.again:
            watched.add(call.name, readings, call.heads, call.first_key)

    said, names = "", None

    def why() -> str:
        return said if names is None else names.why_nothing()

    watched = Watched(running, why)
    with catch(model, listen) as net:
        names = net.names
        try:
            yield watched
        finally:  # what was seen does not hold on to the model
            said, names = why(), None
