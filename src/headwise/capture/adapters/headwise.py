"""headwise's own layer, which tells of its calls itself; and `attend()` and `observe()` as people
call them in modules of their own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

from torch import Tensor

from ...attend import attend
from ...core import heard
from ...core.call import Call
from ...core.masks import as_mask
from ...layers.attention import MultiHeadAttention, Observer
from ...stats.base import Statistic
from ...stats.observe import observe
from ...stats.results import Reading
from ..call import HeadsCall, Looking
from ..mask_import import at_the_end
from ..net import Net, Replaced, silence
from ..parts import Waiting


class OwnCall(HeadsCall):
    """A call of `MultiHeadAttention`: output and statistics come from the same pass.

    Unless somebody else has made the output, or there are padded queries, which the statistics
    leave out and the output does not.
    """

    layer: MultiHeadAttention

    @property
    def all_heads(self) -> int:
        return self.layer.all_heads

    def observe(self, statistics: Iterable[Statistic], looking: Looking) -> Mapping[str, Reading]:
        if isinstance(self.made, Tensor) or self.counted(looking) is not self.mask:
            return super().observe(statistics, looking)
        seen = observe(
            self.q,
            self.k,
            self.v,
            *statistics,
            projection=self.projection,
            **looking.keywords,
            **self.keywords,
        )
        self.made = seen.out
        return seen.readings.let_go()


class _Observer:
    """Tells nets of a layer's calls, outermost first; `before` is who observed the layer."""

    def __init__(self, before: Observer | None) -> None:
        self.before = before
        self.nets: tuple[Net, ...] = ()

    def __call__(
        self,
        layer: MultiHeadAttention,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        keywords: dict[str, Any],
    ) -> Tensor:
        made: Any = partial(_untold, attend, q, k, v, **keywords)
        if self.before is not None:
            made = _untold(self.before, layer, q, k, v, keywords)
        for net in self.nets:
            if not net.open:
                continue
            call = OwnCall(
                net.names.name_of(layer) or "",
                "headwise",
                q,
                k,
                v,
                made,
                keywords={**keywords, "mask": as_mask(keywords["mask"])},
                projection=layer.projection,
                own_positions=layer.own_positions,
                first_key=layer.first_key,
                first_head=layer.first_head,
            )
            call.layer = layer
            new = net.tell(call)
            made = call.out if new is None else new
        return made if isinstance(made, Tensor) else made()


def _untold(function: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    """Call a function as a part of what is told."""
    with silence():
        return function(*args, **kwargs)


_LOCK = threading.Lock()


@contextmanager
def own_layers(net: Net) -> Iterator[None]:
    """Hear of the calls of the model's `MultiHeadAttention` layers, with others that hear of them,
    who may end before or after."""
    layers = [m for m in net.names.model.modules() if isinstance(m, MultiHeadAttention)]
    with _LOCK:
        for layer in layers:
            if not isinstance(layer.observer, _Observer):
                layer.observer = _Observer(layer.observer)
            layer.observer.nets = (*layer.observer.nets, net)
    try:
        yield
    finally:
        with _LOCK:
            for layer in layers:
                if not isinstance(observer := layer.observer, _Observer):
                    continue
                observer.nets = tuple(other for other in observer.nets if other is not net)
                if not observer.nets:
                    layer.observer = observer.before


# ── calls of people's own modules ───────────────────────────────────────────────────────────────


def own_calls(net: Net) -> AbstractContextManager[None]:
    """Hear of the calls of `attend()` and `observe()` that are in no `MultiHeadAttention`."""
    return _CALLS.heard_by(net)


def _listen() -> Callable[[], None]:
    heard.observers.append(_tell)
    return lambda: heard.observers.remove(_tell)


_CALLS = Replaced(_listen)


def _tell(asked: Call, out: Tensor) -> Tensor:
    """Tell every net, those inside of what those outside have made of the output."""
    names = ("mask", "scale", "softcap", "sinks")
    keywords = {name: getattr(asked, name) for name in names}
    for net in _CALLS.nets:
        call = HeadsCall(
            net.names.current,
            "attend",
            asked.q,
            asked.k,
            asked.v,
            out,
            keywords=keywords | {"first_query": asked.extent.first_query},
            own_positions=not net.names.crosses and at_the_end(asked.mask, asked.extent),
        )
        said = f"attend giving {list(out.shape)}"
        waiting = Waiting(call.name, said, out, out.shape, call.keys, sure=True, by_hand=False)
        new = net.tell(call, waiting)
        out = out if new is None else new
    return out
