"""Attention weights between layouts, and on disk."""
