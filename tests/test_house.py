"""The house rules: who may import whom, what an import costs, what fresh processes can do."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "headwise"

# A file imports only files above it. `__init__` gives the public names of all that stand above it.
ORDER = [
    *("_axes", "_index", "_modes", "_numbers", "_lazy", "_text", "_files", "grids", "looked"),
    *("masks", "definition", "sampling"),
    *("kernels", "kernels.cpu", "kernels.cpu_ops"),
    *(
        "backends.base",
        "backends.eager",
        "backends.blocked",
        "backends.tiles",
        "backends.sdpa",
        "backends.terms",
        "backends.again",
        "backends.native",
        "backends",
    ),
    *("readings", "scores", "masses", "sweep", "evidence", "reach", "attend", "statistics"),
    *("patterns", "running"),
    *("rope", "cache", "layer", "layouts", "packing", "convert"),
    *(
        f"watching.{name}"
        for name in (
            *(
                "contents",
                "foreign",
                "parts",
                "calls",
                "names",
                "net",
                "replaced",
                "roads",
                "leading",
                "nested",
                "own",
                "functional",
            ),
            *("handwritten", "composite", "varlen", "flexible", "hugging_arguments", "hugging"),
            *("compiled", "backward", "catching", "seen_file", "seen", "watch"),
            *("outputs", "ablate", "effects", "importance"),
        )
    ),
    *("watching", "naming", "figures"),
    *("check.findings.verdict", "check.findings.rules", "check.findings.triage", "check.findings"),
    *(
        f"check.target.{name}"
        for name in (
            *(
                "names",
                "construct",
                "call_adapter",
                "introspect",
                "checked_target",
                "masking",
                "resolve",
            ),
        )
    ),
    "check.target",
    *(
        f"check.probes.{name}"
        for name in ("probe_context", "behaviour", "advice", "arguments", "robustness")
    ),
    *(
        f"check.diagnosis.{name}"
        for name in (
            *("projections", "variants", "call_lines", "fit", "static_checks", "faults", "search"),
        )
    ),
    *("check.probes", "check.diagnosis"),
    *("check", "stored", "gpt_folder", "gpt_config", "gpt", "corpus"),
    *(
        f"looking.{name}"
        for name in (
            *(
                "tokens",
                "sample",
                "samples",
                "texts",
                "sizes",
                "folders",
                "plain",
                "images",
                "hugging",
            ),
            *("subjects", "similar", "gather", "rows", "api"),
        )
    ),
    *("looking", "__init__", "testing"),
    *(
        "systems.scalar",
        "systems._checks",
        "systems.per_head",
        "systems.split",
        "systems.functional",
    ),
    *("systems.fused", "systems.variants", "systems.max_gpt2", "systems", "timing"),
    *(f"check.files.{name}" for name in ("syntax", "loading", "keeper", "sandbox")),
    *("check.files", "check.findings.rules"),
    *(
        f"check.steps.{name}"
        for name in ("base", "gpt2_parts", "gpt2", "naming", "gpt2_max", "layers", "scalar")
    ),
    *("check.steps", "check.command"),
    *("checkpoint", "run", "training", "generation"),
    *("weight_files", "rungs", "ladder", "page.parts", "page.report", "page", "page.ladder"),
    *(f"looking.{name}" for name in ("compare", "terminal", "command")),
    *("console", "cli"),
]

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


def module_name(path: Path) -> str:
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


def imports(source: str, package: tuple[str, ...] = ()) -> set[str]:
    """The modules of headwise that a file's text imports, anywhere in it."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            inside = ["headwise", *package]
            base = inside[: len(inside) - node.level + 1] if node.level else []
            stem = ".".join([*base, *filter(None, [node.module])])
            names = [stem, *(f"{stem}.{alias.name}" for alias in node.names)]
        ours = (name.split(".") for name in names)
        found |= {".".join(parts[1:]) for parts in ours if parts[0] == "headwise"}
    return found & {module_name(path) for path in SOURCE.rglob("*.py")}


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("*.py")), ids=module_name)
def test_a_file_imports_only_files_above_it(path: Path) -> None:
    name = module_name(path)
    assert name in ORDER, f"{name} has no place in the order of the house"
    found = imports(path.read_text(), path.relative_to(SOURCE).parts[:-1])
    below = {other for other in found if ORDER.index(other) >= ORDER.index(name)}
    assert not below, f"{name} imports {below}, which stand below it"


def test_every_kind_of_import_is_seen() -> None:
    assert imports("from .attend import attend") == {"attend"}
    assert imports("def f():\n    import headwise.layer") == {"layer"}
    assert imports("from . import attend") == {"attend"}
    assert imports("from ..masks import Mask", ("backends",)) == {"masks"}
    assert imports("from .base import Call", ("backends",)) == {"backends.base"}
    assert imports("import torch, numpy") == set()


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


def test_importing_headwise_imports_nothing_heavy() -> None:
    done = run(
        "import sys, torch; before = set(sys.modules); import headwise; "
        "print(sorted({m.split('.')[0] for m in set(sys.modules) - before}))"
    )
    heavy = {"transformers", "plotly", "typer", "rich", "tokenizers", "pandas", "matplotlib"}
    assert done.returncode == 0, done.stderr
    assert not heavy & set(ast.literal_eval(done.stdout))


def test_attend_and_the_layer_compile_whole() -> None:
    done = run(
        """
import torch, headwise as hw
q = torch.randn(2, 6, 7, 5)
k = torch.randn(2, 3, 11, 5)
for mask in (None, hw.Causal(), hw.Window(3), hw.Padding(torch.tensor([4, 11])) & hw.Causal()):
    for backend in ("sdpa", "blocked", "eager"):
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
