"""Adapters: each file captures one foreign attention API in headwise's own terms."""
