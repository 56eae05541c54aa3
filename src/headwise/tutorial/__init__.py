"""Multi-head attention as five tutorials build it: run, compared and timed."""
