"""What pages show of runs on record: costs and pictures of statistics, and the entropy floor.

python -m benchmarks.pages            # write them again from the runs in benchmarks/results/
python -m benchmarks.pages --look     # first look at the built-in model anew, for the pictures
"""
