"""Where the tests run."""

import os


def in_ci() -> bool:
    """Under CI a missing tool is a failure, not a skip."""
    return os.environ.get("CI") == "true"
