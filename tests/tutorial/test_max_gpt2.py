"""The rung on MAX where MAX is not: what it says, and that nothing else wants it.

The rung itself is tested by `make test-max`, in an environment of its own.
"""

import subprocess
import sys

BLOCK = """
import sys
class Blocked:
    asked = False
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "max":
            self.asked = True
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
blocked = Blocked()
sys.meta_path.insert(0, blocked)
"""


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", BLOCK + code],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_without_max_the_error_says_what_to_install_and_that_it_is_proprietary() -> None:
    done = run("import headwise.systems.max_gpt2")
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith("ImportError: headwise.systems.max_gpt2 needs Modular MAX")
    assert "proprietary, with its own license" in last
    assert "pip install max==25.7.0 rich transformers" in last


def test_nothing_else_asks_for_max() -> None:
    code = """
import importlib, pkgutil
import headwise.systems
for module in pkgutil.iter_modules(headwise.systems.__path__):
    if module.name != "max_gpt2":
        importlib.import_module(f"headwise.systems.{module.name}")
import headwise.cli
assert not blocked.asked
try:
    import headwise.systems.max_gpt2
except ImportError:
    assert blocked.asked
    print("fine")
"""
    done = run(code)
    assert done.stdout == "fine\n", done.stderr
