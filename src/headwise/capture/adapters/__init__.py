"""Adapters: one foreign attention API a file, told in headwise's own terms."""
