"""Run, compare and time the multi-head attention of five tutorials."""
