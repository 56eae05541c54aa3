"""Common sentences about attention heads, each measured; `docs/claims.md` is drawn from the runs.

python -m benchmarks.claims                     # all of it, about an hour on one core
python -m benchmarks.claims --only paths count  # some of the experiments
python -m benchmarks.claims --render            # the page alone, from the runs on record
python -m benchmarks.claims.relation_page verb-object   # the head that catches it, on a sentence
"""
