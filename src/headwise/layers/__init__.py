"""Attention layers: `MultiHeadAttention`, rotary positions, key/value caches."""
