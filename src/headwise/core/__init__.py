"""Describe one attention call: sizes, masks and the definition. Nothing runs here."""
