"""Random calls of the native kernel, held to the definition in float64 within derived bounds.

`python -m fuzz --help` in this folder's parent, or `make fuzz`, runs as many as are asked for;
`tests/kernels/test_fuzz.py` runs a thousand.
"""
