"""What the scalar model needs to end under the bigram: position, attention, both or neither.

    python benchmarks/scalar.py [STEPS]      # default 1000; writes benchmarks/results/

Every variant has the same 4,192 parameters, and sees the same documents in the same order.
"""

import platform
import sys
from datetime import UTC, datetime
from pathlib import Path

import recording
from headwise.systems import scalar
from headwise.systems.scalar import Matrix, ScalarGPT, Vector

SEEDS = (0, 1, 2)


class NoPast(ScalarGPT):
    """Attention that finds only the token itself."""

    def gpt(self, token: int, position: int, keys: list[Matrix], values: list[Matrix]) -> Vector:
        return super().gpt(token, position, self.empty(), self.empty())


class NoPosition(ScalarGPT):
    """Every token stands at position 0."""

    def gpt(self, token: int, position: int, keys: list[Matrix], values: list[Matrix]) -> Vector:
        return super().gpt(token, 0, keys, values)


class Neither(NoPast, NoPosition):
    """The token is all that is known, as in a bigram model."""


KINDS = {"both": ScalarGPT, "position": NoPast, "attention": NoPosition, "neither": Neither}


def main() -> None:
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 1000
    words, rows = scalar.unicode_words(), []
    for seed in SEEDS:
        for name, kind in KINDS.items():
            print(f"-- seed {seed}, {name}")
            figures = scalar.run(
                words, steps=steps, seed=seed, samples=0, temperature=1.0, kind=kind
            )
            rows.append({"seed": seed, "has": name, **figures})
    now = datetime.now(UTC)
    found = {"benchmark": "scalar parts", "date": now.isoformat(timespec="seconds")}
    settings = {"steps": steps, "seeds": SEEDS, "python": platform.python_version()}
    out = Path(__file__).parent / "results" / f"scalar-parts-{now:%Y%m%dT%H%M%SZ}.json"
    print(recording.write_run(out, {**found, "settings": settings, "rows": rows}))


if __name__ == "__main__":
    main()
