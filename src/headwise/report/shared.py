"""One look of one rank or of several: what each found in its texts, merged."""

from __future__ import annotations

from dataclasses import dataclass

from ..capture.captured import Watched
from ..capture.effects import HeadEffects
from .collect import Found


@dataclass(frozen=True)
class Shared:
    """The ranks that look together; of one, all is merged already."""

    rank: int = 0
    size: int = 1

    @classmethod
    def over_ranks(cls) -> Shared:
        """The ranks of the default process group."""
        from torch import distributed as dist

        if not (dist.is_available() and dist.is_initialized()):
            return ALONE
        return cls(dist.get_rank(), dist.get_world_size())

    def sums(self, *numbers: float | int) -> list[float | int]:
        """The sums of numbers over ranks; every rank must ask."""
        if self.size == 1:
            return list(numbers)
        from ..parallel.merging import gathered

        return [sum(one) for one in zip(*gathered(numbers), strict=True)]

    def merge(self, found: Found) -> None:
        """Put into `found` what all ranks found; the layers that are shown are those of rank 0."""
        if self.size == 1:
            return
        from ..parallel.merging import gathered

        parts = gathered((found.seen, found.layers, found.modules))
        found.seen = sum((seen for seen, _, _ in parts), Watched(running=True))
        found.layers = parts[0][1]
        found.modules = {k: v for _, _, modules in reversed(parts) for k, v in modules.items()}

    def merged(self, effects: HeadEffects | None) -> HeadEffects:
        """The samples of all ranks; `None` of a rank without any."""
        if self.size == 1:
            assert effects is not None  # there is a text, or an error before this
            return effects
        from ..parallel.merging import merged

        whole = merged(effects)
        assert isinstance(whole, HeadEffects)
        return whole


ALONE = Shared()
