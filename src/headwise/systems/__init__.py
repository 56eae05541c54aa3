"""The ladder: the same attention, from scalars to fused kernels, each rung written to be read.

Each file is one rung, with the names of the tutorial it comes from, so that a reader of that
tutorial is at home and its state dicts load. They compute attention themselves, step by step;
`headwise ladder` runs them side by side on the same weights, which `headwise.convert` moves.

    scalar      plain Python, number by number, with its own gradients
    per_head    a module a head, and a loop over them
    split       one projection for all heads, then split
    functional  attention as a function of Q, K and V; self- and cross-attention
    fused       q, k and v from one matrix, as GPT-2 stores it, and a cache
    max_gpt2    the same on Modular MAX, where that is installed
    variants    what else people write: einsum, SDPA, FlexAttention, PyTorch's own layer
"""
