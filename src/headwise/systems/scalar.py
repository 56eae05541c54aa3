"""See `headwise.tutorial.implementations.scalar`."""

import sys

from ..tutorial.implementations.scalar import *  # noqa: F403
from ..tutorial.implementations.scalar import main

if __name__ == "__main__":
    sys.exit(main())
