"""The ladder: the same attention, from scalars to fused kernels, in readable files.

Each file is one rung and uses the names of its tutorial, so that state dicts of that tutorial load.
The rungs compute attention step by step; `headwise ladder` compares them on the same weights, which
`headwise.convert` converts.

    scalar      plain Python, number by number, with its own gradients
    per_head    a module per head, and a loop over the heads
    split       one projection for all heads, then split
    functional  attention as a function of Q, K and V; self- and cross-attention
    fused       q, k and v from one matrix, as GPT-2 stores it, and a cache
    max_gpt2    the same on Modular MAX, if it is installed
    variants    other ways to write it: einsum, SDPA, FlexAttention, PyTorch's own layer
"""
