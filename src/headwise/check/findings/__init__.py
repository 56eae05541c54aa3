"""Rules, verdicts, and which finding follows from which."""
