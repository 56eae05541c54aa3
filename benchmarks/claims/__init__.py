"""Experiments behind docs/claims.md, one script each: `python -m benchmarks.claims`."""
