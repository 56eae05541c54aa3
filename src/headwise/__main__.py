"""The command line, for `python -m headwise` and `torchrun -m headwise`."""

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
