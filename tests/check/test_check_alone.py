"""Files whose package, or what they import, cannot be imported here."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from headwise.check import check
from headwise.check.files.alone import Absent
from headwise.check.files.loading import chosen, load
from headwise.check.target.errors import Broken

pytestmark = pytest.mark.usefixtures("imports")

RIGHT = """
import torch
from torch import nn

class Attention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.parts(x))
        heads = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1) @ v
        return self.proj(heads.transpose(1, 2).flatten(2))

    def parts(self, x):
        return self.qkv(x).chunk(3, -1)
"""


def write(folder: Path, **files: str) -> Path:
    """Files in a package `pack`; the path of `layer.py`."""
    (folder / "pack").mkdir()
    for name, text in {"__init__": "", **files}.items():
        (folder / "pack" / f"{name}.py").write_text(text)
    return folder / "pack" / "layer.py"


def test_constants_stand_beside_what_reads_files(tmp_path: Path) -> None:
    reader = (
        "def words():\n    return open('words that are not there').read().split()\nALL = words()\n"
    )
    constants = "from .reader import *\nSIZE = len(ALL)\nHEADS = 3\n"
    layer = "from .constants import *\n" + RIGHT + "\nDIM = 8 * HEADS\n"
    path = write(tmp_path, reader=reader, constants=constants, layer=layer)
    module = load(path)
    assert vars(module)["DIM"] == 24
    assert check(chosen(module, path, "Attention"), 24, 3).passed


def test_a_package_that_cannot_be_imported_is_left_out(tmp_path: Path) -> None:
    begin = "from .parts import HEADS\nfrom __future__ import annotations\n".splitlines()
    path = write(
        tmp_path,
        __init__="open('version.txt that is not there')\n",
        parts="HEADS = 3\n",
        layer="\n".join(begin[::-1]) + RIGHT,
    )
    module = load(path)
    assert module.HEADS == 3
    verdict = check(module.Attention)
    assert verdict["definition"].severity == "passed"
    assert verdict.notes[-1].startswith("it was loaded without what failed as it was imported")
    assert "version.txt" in verdict.notes[-1]


LOST = "from torch import nn as layers, lost_thing\nimport lost_package.parts as lost\n"


def test_what_the_layer_does_not_speak_of_may_be_absent(tmp_path: Path) -> None:
    block = "\nclass Block(lost.Block):\n    size = 3\n\n@lost.registered\ndef block(): ...\n"
    module = load(write(tmp_path, layer=LOST + RIGHT + block))
    assert isinstance(module.Block, Absent)
    assert isinstance(module.block, Absent)
    assert module.layers is module.nn
    verdict = check(chosen(module, tmp_path / "pack" / "layer.py", None))
    assert verdict["definition"].severity == "passed"
    assert not verdict.unchecked
    with pytest.raises(Broken, match="lost_package"):
        chosen(module, tmp_path / "pack" / "layer.py", "Block")


@pytest.mark.parametrize(
    ("lost", "cure"),
    [(LOST, "pip install lost_package"), ("from . import lost\n", "")],
    ids=["a package", "a part of its own"],
)
def test_what_a_layer_uses_and_is_absent_is_named(tmp_path: Path, lost: str, cure: str) -> None:
    parts = "\ndef cut(x):\n    return lost.cut(x, 3)\n"
    text = lost + RIGHT.replace("self.qkv(x).chunk(3, -1)", "cut(self.qkv(x))") + parts
    module = load(write(tmp_path, layer=text))
    with pytest.raises(ValueError, match="its call wants what could not be imported") as raised:
        check(module.Attention)
    assert ("pip install" in str(raised.value), cure in str(raised.value)) == (bool(cure), True)


def test_what_speaks_of_the_absent_is_not_judged_by_it(tmp_path: Path) -> None:
    text = RIGHT.replace("        return self.qkv(x)", "        {}\n        return self.qkv(x)")
    text = LOST + text.format("if x.is_meta: return lost.parts(x)") + "\nclass Mixed(Attention):\n"
    text += "    def parts(self, x):\n        return super().parts(x.flip(0))\n"
    module = load(write(tmp_path, layer=text))
    assert check(module.Attention)["definition"].severity == "passed"
    verdict = check(module.Mixed)
    assert verdict.passed
    assert "no lost, which could not be imported" in verdict["batch"].message


def test_a_base_class_that_is_absent_excuses_nothing(tmp_path: Path) -> None:
    text = RIGHT.replace("nn.Module", "lost.LostModule").replace("** 0.5", "** 0.25")
    verdict = check(load(write(tmp_path, layer=LOST + text)).Attention)
    assert [one.rule for one in verdict.errors] == ["scale"]


@pytest.mark.parametrize(
    "line",
    ["from .parts import cut", "from pack.parts import cut", "from .deep import parts, cut"],
)
def test_what_another_file_of_its_own_defines_is_taken_from_it(tmp_path: Path, line: str) -> None:
    text = f"{line}\n" + RIGHT.replace("self.qkv(x).chunk(3, -1)", "cut(self.qkv(x))")
    other = (
        "import lost_package\nfrom .more import AXIS\n\ndef cut(x):\n    return x.chunk(3, AXIS)\n"
    )
    more = "from lost_package import more\nAXIS = -1\nprint(1 / 0)\n"
    path = write(tmp_path, __init__="import lost_package\n", parts=other, more=more, layer=text)
    (path.parent / "deep").mkdir()
    deep = "import lost_package\nfrom ..parts import cut\nparts = None\n"
    (path.parent / "deep" / "__init__.py").write_text(deep)
    verdict = check(load(path).Attention)
    assert verdict["definition"].severity == "passed"
    assert not verdict.unchecked


def test_a_way_to_set_first_weights_is_taken_from_pytorch(tmp_path: Path) -> None:
    text = "from lost_package.init import trunc_normal_\n" + RIGHT.replace(
        "    def forward", "        trunc_normal_(self.proj.weight, std=0.02)\n\n    def forward"
    )
    assert check(load(write(tmp_path, layer=text)).Attention).passed


@pytest.mark.parametrize(
    "text",
    [
        "import lost_package\n",
        "from lost_package import *\n" + RIGHT,
        "def f(): return 1\n" + RIGHT + "\nclass More(Modul): ...\n",
        LOST + "@lost.registered" + RIGHT[RIGHT.index("\nclass") :],
    ],
    ids=["nothing in it", "star", "mistake", "decorated"],
)
def test_a_mistake_of_its_own_is_still_told(tmp_path: Path, text: str) -> None:
    with pytest.raises(Broken) as raised:
        load(write(tmp_path, layer=text))
    assert raised.value.finding.rule == "file-import"


def test_a_package_that_lies_further_up_is_found(tmp_path: Path) -> None:
    (tmp_path / "shared_tools").mkdir()
    (tmp_path / "shared_tools" / "sizes.py").write_text("HEADS = 3\n")
    folder = tmp_path / "deep"
    folder.mkdir()
    path = write(folder, layer="from shared_tools.sizes import HEADS\n" + RIGHT)
    assert load(path).HEADS == 3


def test_a_clone_of_another_name_is_still_its_package(tmp_path: Path) -> None:
    """A file speaks of its repository's folder as it was called where it was written."""
    clone = tmp_path / "attention-from-scratch-main"
    (clone / ".git").mkdir(parents=True)
    (clone / "tools").mkdir()
    (clone / "tools" / "sizes.py").write_text("HEADS = 3\n")
    path = clone / "layer.py"
    path.write_text("from attention_from_scratch.tools.sizes import HEADS\n" + RIGHT)
    assert load(path).HEADS == 3
    other = write(tmp_path, layer="from attention_from_scratch_too.lost import HEADS\n" + RIGHT)
    assert isinstance(load(other).HEADS, Absent)


def test_a_file_that_reads_data_is_loaded_for_what_it_defines(tmp_path: Path) -> None:
    """What fails as it is imported, and does not concern the layer, is left out."""
    begin = "HEADS = 3\nwith open('input.txt that is not there') as f:\n    text = f.read()\n"
    end = "\nletters = sorted(set(text))\nlayer = Attention(len(letters), HEADS)\nlayer(text)\n"
    path = tmp_path / "lecture.py"
    path.write_text(begin + RIGHT + end)
    module = load(path)
    assert isinstance(module.letters, Absent)
    verdict = check(chosen(module, path, None))
    assert verdict["definition"].severity == "passed"
    assert "input.txt that is not there" in verdict.notes[-1]


def test_a_definition_that_fails_is_not_left_out(tmp_path: Path) -> None:
    path = tmp_path / "layer.py"
    path.write_text(RIGHT.replace("dim, heads):", "dim, heads=HEADS):"))
    with pytest.raises(Broken, match="HEADS"):
        load(path)


def test_a_file_imports_its_own_package_by_name(tmp_path: Path) -> None:
    """Even where another module of that name is installed, or lies beside it."""
    folder = tmp_path / "einops"
    folder.mkdir()
    (folder / "parts.py").write_text("HEADS = 3\n")
    (folder / "einops.py").write_text("")
    path = folder / "layer.py"
    path.write_text("from einops.parts import HEADS\n" + RIGHT)
    known = {name: sys.modules.pop(name) for name in [*sys.modules] if name.startswith("einops")}
    try:
        assert load(path).HEADS == 3
    finally:
        sys.modules.update(known)


def test_what_lightning_would_add_is_not_missed(tmp_path: Path) -> None:
    text = "from __future__ import division\nfrom lost_lightning import LightningModule\n" + RIGHT
    path = write(tmp_path, layer=text.replace("(nn.Module)", "(LightningModule)"))
    assert check(load(path).Attention)["definition"].severity == "passed"


def test_a_library_s_own_module_is_one_of_pytorch_s(tmp_path: Path) -> None:
    text = "from lost_helpers.module import Module\n" + RIGHT.replace("(nn.Module)", "(Module)")
    assert check(load(write(tmp_path, layer=text)).Attention).passed


def test_a_constructor_that_forgets_brackets_is_at_fault_whatever_is_absent(tmp_path: Path) -> None:
    text = "from lost_helpers.module import Module, tracker\n" + RIGHT.replace(
        "(nn.Module)", "(Module)"
    )
    text = text.replace("super().__init__()", "tracker.add\n        super.__init__()")
    (one,) = check(load(write(tmp_path, layer=text)).Attention).errors
    assert one.rule == "builds"
    assert "super().__init__()" in one.hint


def test_a_line_that_fails_behind_a_lost_import_hides_no_definition(tmp_path: Path) -> None:
    verdict = check(load(write(tmp_path, layer=LOST + "1 / 0\n" + RIGHT)).Attention)
    assert verdict["definition"].severity == "passed"
    assert "lost_thing" in verdict.notes[-1]


def test_what_transformers_keeps_elsewhere_now_is_taken_from_there(tmp_path: Path) -> None:
    text = f"from transformers.modeling_utils import Conv1D\n{RIGHT}"
    text = text.replace("nn.Linear(dim, 3 * dim)", "Conv1D(3 * dim, dim)")
    module = load(write(tmp_path, layer=text))
    assert check(module.Attention).passed


def test_a_file_beside_it_that_leaves_python_is_left_out(tmp_path: Path) -> None:
    path = write(
        tmp_path, options="import sys\nsys.exit(2)\n", layer=f"from .options import A\n{RIGHT}"
    )
    verdict = check(load(path).Attention)
    assert verdict.passed
    assert "SystemExit" in " ".join(verdict.notes)


def test_a_part_that_its_own_package_lacks_is_a_mistake(tmp_path: Path) -> None:
    text = f"from pack.turning import turn\n{RIGHT}".replace("self.qkv(x)", "turn(self.qkv(x))")
    module = load(write(tmp_path, layer=text))
    (one,) = check(module.Attention).errors
    assert one.rule == "file-import"
    assert "no pack.turning in your own pack" in one.hint


UNSET = RIGHT.replace(
    "self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)",
    "self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)\n"
    "        self.gain = nn.Parameter(torch.empty(dim))\n"
    "        self.register_buffer('room', torch.Tensor(dim))",
).replace("self.qkv(x)", "self.qkv(x * self.gain + 0 * self.room)")


def test_weights_that_nothing_sets(tmp_path: Path) -> None:
    path = write(tmp_path, layer=UNSET)
    (one,) = check(load(path).Attention).errors
    assert (one.rule, one.message[:33]) == ("init", "Nothing sets the numbers of gain:")
    assert not torch.are_deterministic_algorithms_enabled()


def test_weights_that_another_file_may_set_are_advice(tmp_path: Path) -> None:
    model = (
        "def start(model):\n    for one in model.parameters():\n        one.data.normal_(0, 0.02)\n"
    )
    verdict = check(load(write(tmp_path, layer=UNSET, model=model)).Attention)
    assert verdict.passed
    assert verdict["init"].severity == "warning"


def test_weights_that_the_constructor_sets(tmp_path: Path) -> None:
    begun = UNSET.replace("torch.empty(dim))", "torch.empty(dim).uniform_())")
    assert check(load(write(tmp_path, layer=begun)).Attention)["init"].severity == "passed"


def test_calls_of_what_is_absent_do_nothing_where_nothing_takes_their_result(
    tmp_path: Path,
) -> None:
    text = "import nowhere\n" + RIGHT.replace(
        "        heads = (q", "        nowhere.debug.breakpoint()\n        heads = (q"
    )
    path = write(tmp_path, layer=text)
    assert check(chosen(load(path), path, None), 24, 3).passed


def test_a_module_beside_its_package_is_found(tmp_path: Path) -> None:
    text = "import tools_of_this_test as tools\n" + RIGHT.replace(
        "x).chunk", "tools.same(x)).chunk"
    )
    path = write(tmp_path, layer=text)
    (tmp_path / "tools_of_this_test.py").write_text("def same(x):\n    return x\n")
    (path.parent / "__init__.py").unlink()
    assert check(chosen(load(path), path, None), 24, 3).passed
