"""The house rules: who may import whom, what an import costs, what fresh processes can do."""

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import fresh
import headwise as hw

ROOT = Path(__file__).parents[1]

OPTIONAL = [
    "transformers",
    "plotly",
    "tensorboard",
    "triton",
    "max",
    "x_transformers",
    "matplotlib",
    "pandas",
    "PIL",
]


def linted(source: Path) -> subprocess.CompletedProcess[str]:
    """What import-linter says of a tree, by the contracts in `pyproject.toml`."""
    command = [Path(sys.executable).with_name("lint-imports"), "--no-cache"]
    environment = os.environ | {"PYTHONPATH": str(source)}
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=False
    )


def test_a_room_imports_only_rooms_below_it_and_nothing_goes_round() -> None:
    done = linted(ROOT / "src")
    assert done.returncode == 0, done.stdout
    assert "Contracts: 2 kept, 0 broken." in done.stdout


@pytest.mark.parametrize(
    ("file", "line", "broken"),
    [
        ("core/shapes.py", "def f():\n    import headwise.layers.attention", "rooms above it"),
        ("backends/base.py", "from ..attend import attend", "rooms above it"),
        ("kernels/ctypes_api.py", "from .torch_ops import *", "by way of others"),
    ],
)
def test_a_wrong_import_is_seen(tmp_path: Path, file: str, line: str, broken: str) -> None:
    copy = shutil.copytree(ROOT / "src" / "headwise", tmp_path / "headwise")
    with (copy / file).open("a") as text:
        text.write(f"\n\n{line}\n")
    done = linted(tmp_path)
    assert done.returncode == 1, done.stdout
    assert f"{broken} BROKEN" in done.stdout


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )


BLOCK = f"""
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {OPTIONAL + ["typer", "rich", "tokenizers", "safetensors"]!r}:
            raise ModuleNotFoundError(f"{{name}} is blocked", name=name)
sys.meta_path.insert(0, Blocked())
"""


def test_the_package_needs_nothing_optional() -> None:
    done = run(
        BLOCK
        + """
import torch, headwise as hw
x = torch.randn(2, 7, 24)
layer = hw.MultiHeadAttention(24, num_heads=3)
with hw.watch(layer, hw.Entropy()) as seen:
    layer(x, mask=hw.Causal())
assert len(seen.table()) == 3
print("fine")
"""
    )
    assert done.stdout.strip() == "fine", done.stderr


def test_the_block_can_fail() -> None:
    done = run(BLOCK + "import plotly")
    assert "plotly is blocked" in done.stderr


def test_the_public_names_are_these() -> None:
    statistics = """Distance Entropy LSE Map Mass MaxLogit Norms OffsetHistogram OutputNorm Received
        RowSum Running Segments Similarity Sink Statistic TopKeys"""
    masks = """ALiBi At Bias Causal Dense Documents First FirstOfDocument Induction Mask Padding
        Prefix Previous SameToken Self Window"""
    layers = "EntropyFloor History KVCache Monitor MultiHeadAttention RoPE"
    functions = """ablate ablation_scan accelerate attend attention_of check circuits convert
        detect_layout edit explain head_outputs importance look observe patch prune_ qk_clip_
        register relevance replace_attention_ rollout timeline trace watch"""
    others = "__version__ integrations parallel"
    names = " ".join((statistics, masks, layers, functions, others)).split()
    assert sorted(dir(hw)) == sorted(names)
    assert len(names) <= 70
    for name in names:
        getattr(hw, name)


def test_importing_headwise_imports_nothing_heavy() -> None:
    done = run(
        "import sys, torch; before = set(sys.modules); finders = list(sys.meta_path); "
        "import headwise; assert sys.meta_path == finders; "
        "print(sorted(set(sys.modules) - before))"
    )
    heavy = "transformers plotly typer rich tokenizers safetensors pandas matplotlib sqlite3"
    assert done.returncode == 0, done.stderr
    loaded = ast.literal_eval(done.stdout)
    assert not set(heavy.split()) & {name.split(".")[0] for name in loaded}
    assert sum(name.split(".")[0] == "headwise" for name in loaded) <= 80


def test_attend_and_the_layer_compile_whole() -> None:
    done = fresh.run(
        """
import torch, headwise as hw
q = torch.randn(2, 6, 7, 5)
k = torch.randn(2, 3, 11, 5)
MASKS = hw.Window(3), hw.Padding(torch.tensor([4, 11])) & hw.Causal(), None, hw.Causal()
for backend, count in ("sdpa", 4), ("blocked", 2), ("eager", 2):
    for mask in MASKS[:count]:
        torch._dynamo.reset()  # every combination is a graph of its own
        step = lambda q, k: hw.attend(q, k, k, mask=mask, backend=backend)
        graph = torch.compile(step, fullgraph=True, backend="eager")
        torch.testing.assert_close(graph(q, k), step(q, k))
layer, x = hw.MultiHeadAttention(24, num_heads=3), torch.randn(2, 7, 24)
graph = torch.compile(layer, fullgraph=True, backend="eager")
torch.testing.assert_close(graph(x, mask=hw.Causal()), layer(x, mask=hw.Causal()))
print("fine")
"""
    )
    assert done.stdout.strip() == "fine", done.stderr
