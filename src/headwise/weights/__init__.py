"""Conversion of attention weights between layouts, and model folders."""
