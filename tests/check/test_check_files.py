"""`headwise check FILE.py`: what is checked, exit codes, files that do their worst, lessons."""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from string import Formatter
from typing import Any

import pytest

from headwise.check import explain
from headwise.check.files import literal, split_target
from headwise.check.rules import ALL
from headwise.check.sandbox import Limits, run
from headwise.cli import main
from sessions import pattern, sessions

PAGE = Path(__file__).parents[2] / "docs" / "checking.md"

RIGHT = """
import torch
from torch import nn


class SelfAttention(nn.Module):
    def __init__(self, d_model, n_heads):
        super().__init__()
        if d_model % n_heads:
            raise ValueError(f"d_model={d_model} must be a multiple of n_heads={n_heads}")
        self.n_heads = n_heads
        self.to_qkv = nn.Linear(d_model, 3 * d_model)
        self.proj = nn.Linear(d_model, d_model)

    def forward(self, x):
        B, T, E = x.shape
        q, k, v = (
            part.view(B, T, self.n_heads, -1).transpose(1, 2)
            for part in self.to_qkv(x).chunk(3, dim=-1)
        )
        scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5
        later = torch.ones(T, T, dtype=torch.bool, device=x.device).triu(1)
        weights = scores.masked_fill(later, float("-inf")).softmax(dim=-1)
        return self.proj((weights @ v).transpose(1, 2).reshape(B, T, E))
"""
UNSCALED = RIGHT.replace(" / q.shape[-1] ** 0.5", "")
FORWARD = "    def forward(self, x):\n"  # where things are put in that happen at a call


def write(folder: Path, text: str, name: str = "mine.py") -> str:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, "utf-8")
    return str(path)


def checked(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    """The verdict as JSON; the exit code says the same."""
    code = main(["check", "--json", *map(str, arguments)])
    out, err = capsys.readouterr()
    assert err == ""
    assert out.count("\n") == 1
    data = json.loads(out)
    assert code == (0 if data["passed"] else 1)
    return data


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert main(["check", *map(str, arguments)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("headwise: ")
    assert err.count("\n") == 1
    return err


# --- verdicts -------------------------------------------------------------------------------------


def test_a_right_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", write(tmp_path, RIGHT)]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert out.startswith("SelfAttention(d_model=24, n_heads=3): no mistakes found\n")
    assert "Observed: causal · 3 heads of 8" in out
    assert "(--all lists them)" in out
    assert "❌" not in out
    assert "Why?" not in out
    assert [path.name for path in tmp_path.iterdir()] == ["mine.py"]  # no __pycache__


@pytest.mark.usefixtures("forked")
def test_a_wrong_file_gets_the_mistakes_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path, UNSCALED)
    assert main(["check", path]) == 1
    out = capsys.readouterr().out
    assert "❌ scale: The scores are not scaled at all" in out
    assert "   Fix: Nothing divides the scores" in out
    assert "✅" not in out
    assert "← " not in out
    assert out.endswith("Why? headwise check --explain scale\n")
    data = checked(capsys, path)
    assert [one["rule"] for one in data["findings"]] == ["scale"]
    assert data["findings"][0]["example"]["expected"] != data["findings"][0]["example"]["actual"]
    assert main(["check", path, "--all"]) == 1
    out = capsys.readouterr().out
    assert "✅ causality: Later tokens do not change earlier outputs." in out
    assert "torch.manual_seed(0); x = torch.randn(1, 3, 24" in out


COMMAND = "import sys; from headwise.cli import main; sys.argv[0] = 'headwise'; sys.exit(main())"
"""What the command `headwise` does; it runs files in copies of itself."""


def test_the_shell_sees_the_exit_codes(tmp_path: Path) -> None:
    text = "import os\nprint(*os.environ)\nos._exit(3)\n"
    call = [sys.executable, "-c", COMMAND, "check", write(tmp_path, text)]
    secret = {**os.environ, "SECRET_TOKEN": "a-secret"}
    done = subprocess.run(call, capture_output=True, text=True, check=False, env=secret)
    assert done.returncode == 1, done.stderr
    assert "OMP_NUM_THREADS" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr
    assert "SECRET" not in done.stdout + done.stderr


# --- what is checked, and with which arguments ----------------------------------------------------

HEADS = """
import torch
from torch import nn
from headwise.systems import per_head

class Head(per_head.CausalAttention):
    pass

class FeedForward(nn.Linear):
    pass

class MultiHeadAttention(nn.Module):
    def __init__(self, d_in, d_out, context_length, num_heads):
        super().__init__()
        self.heads = nn.ModuleList(
            Head(d_in, d_out // num_heads, context_length, 0.0) for _ in range(num_heads)
        )

    def forward(self, x):
        return torch.cat([head(x) for head in self.heads], dim=-1)

class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.attention = MultiHeadAttention(width, width, 16, 3)

def main():
    print("not run")

ready = MultiHeadAttention(24, 24, 16, 3)
"""


@pytest.mark.usefixtures("forked")
def test_the_outermost_attention_is_chosen(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = checked(capsys, write(tmp_path, HEADS))
    assert data["subject"].startswith("MultiHeadAttention(")
    assert data["passed"]
    assert checked(capsys, f"{tmp_path}/mine.py:ready")["passed"]
    data = checked(capsys, f"{tmp_path}/mine.py:Head", "--d_in", "24", "--arg", "d_out=8")
    assert data["subject"].startswith("Head(")
    assert "d_out=8" in data["subject"]


@pytest.mark.usefixtures("forked")
def test_a_function_of_q_k_and_v(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = "import torch\ndef attend(q, k, v):\n    return (q @ k.mT).softmax(-1) @ v\n"
    data = checked(capsys, write(tmp_path, text), "--num_heads", "3", "--causal=false")
    assert data["findings"][0]["rule"] == "scale"


FLAVOURED = RIGHT.replace("n_heads)", "n_heads, flavour)", 1).replace(
    "super().__init__()", "super().__init__()\n        self.kind = flavour.kind.name", 1
)


@pytest.mark.parametrize(
    ("text", "words", "message"),
    [
        ("x = 1", [], "no attention found: define an nn.Module"),
        (
            RIGHT + RIGHT.replace("SelfAttention", "CrossAttention"),
            [],
            "it defines SelfAttention, Cross",
        ),
        (RIGHT, [":Gone"], "Gone is not defined; the file defines SelfAttention"),
        (FLAVOURED, [], "--flavour"),
        (RIGHT, ["--flavour", "3"], "the constructor has no argument flavour; it has d_model, n_h"),
        (RIGHT, ["--d_model"], "--d_model: no such option; a constructor argument needs"),
        (RIGHT, ["--arg", "d_model"], "give a name and a value, as in --arg num_heads=3"),
        (RIGHT, ["--timeout", "0"], "seconds must be above 0"),
        (RIGHT, ["other.py"], "give only one file"),
    ],
)
@pytest.mark.usefixtures("forked")
def test_what_cannot_be_worked_out_is_asked_for_in_one_line(
    text: str, words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path, text)
    if words and words[0].startswith(":"):
        path, words = path + words[0], words[1:]
    assert message in refused(capsys, path, *words)


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("gone.py", "gone.py: no such file"),
        (".", "is a directory"),
        ("notes.txt", "must be a Python file"),
    ],
)
def test_targets_that_are_no_files(
    target: str,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path, "", "notes.txt")
    assert message in refused(capsys, target)


def test_targets_and_values(tmp_path: Path) -> None:
    path = Path(write(tmp_path, "", "a b:c.py"))
    assert split_target(f"{path}") == (path, None)
    assert split_target(f"{path}:Outer.Inner") == (path, "Outer.Inner")
    given = {"3": 3, "-0.5": -0.5, "None": None, "FALSE": False, "relu": "relu", "[1, 2]": [1, 2]}
    assert {text: literal(text) for text in given} == given


@pytest.mark.usefixtures("forked")
def test_files_beside_it_packages_and_borrowed_names(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(
        tmp_path,
        "from dataclasses import dataclass\n@dataclass\nclass Sizes:\n    width: int = 24\n",
        "sizes.py",
    )
    text = "from sizes import Sizes\n" + RIGHT.replace(
        "d_model, n_heads)", "d_model=Sizes.width, n_heads=3)", 1
    )
    assert checked(capsys, write(tmp_path, text, "math.py"))["passed"]
    write(tmp_path, "", "outer/__init__.py")
    write(tmp_path, "", "outer/inner/__init__.py")
    write(tmp_path, "WIDTH = 24\n", "outer/sizes.py")
    text = "from ..sizes import WIDTH\n" + RIGHT.replace("n_heads)", "n_heads=3, width=WIDTH)", 1)
    assert checked(capsys, write(tmp_path, text, "outer/inner/mine.py"))["passed"]


@pytest.mark.usefixtures("forked")
def test_what_a_file_sets_for_everybody_is_put_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "import torch\ntorch.set_default_dtype(torch.float64)\ntorch.set_grad_enabled(False)\n"
    assert checked(capsys, write(tmp_path, text + RIGHT))["passed"]


# --- files that do their worst --------------------------------------------------------------------


def called(code: str) -> str:
    """The right attention, with something that happens when it is called."""
    lines = "".join(f"        {line}\n" for line in code.splitlines())
    return "import os, sys, time\n" + RIGHT.replace(FORWARD, FORWARD + lines)


WORST = {
    "loops at import": (
        "x = 1\nwhile x:\n    pass\n",
        "file-time",
        r"while it was imported, at line [23]: `",
    ),
    "loops when called": (
        called("while True:\n    pass"),
        "file-time",
        r"after 3 s, while it was checked, at line \d+ in `forward`: `(while True:|pass)`",
    ),
    "sleeps": ("import time\ntime.sleep(1000)\n", "file-time", r"at line 2: `time.sleep\(1000\)`"),
    "exit() at import": ("exit()\n", "file-exit", "exited Python while it was imported"),
    "sys.exit when called": (called("sys.exit('bye')"), "file-exit", "while it was checked"),
    "os._exit at import": ("import os\nos._exit(5)\n", "file-exit", "while it was imported"),
    "os._exit when called": (called("os._exit(0)"), "file-exit", "while it was checked"),
    "unknown name": (
        "def f(): pass\nclass A(Modul): pass\n",
        "file-import",
        "'Modul' is not defined.*line 2",
    ),
    "missing module": (
        "import nothing_such\n",
        "file-import",
        "No module named 'nothing_such'",
    ),
    "missing step": ("import step_01\n", "file-import", "No module named 'step_01'"),
    "raises": (
        "1 / 0\n",
        "file-import",
        r"ZeroDivisionError: .* \(line 1, `1 / 0`\)",
    ),
    "asks": ("name = input('who? ')\n", "file-import", "EOFError"),
    "interrupts": (called("raise KeyboardInterrupt"), "file-call", "KeyboardInterrupt"),
    "is no Python": (
        "def f(:\n    pass\n",
        "file-syntax",
        r"Line 1 is not valid Python.*`def f\(:`",
    ),
    "is no text": ("x = '\udcff'", "file-syntax", "cannot be read as Python"),
    "prints a verdict and leaves": (
        'print(\'{"verdict": ""}\')\nexit()\n',
        "file-exit",
        "while it was imported",
    ),
    "takes all memory": (
        "import torch\nkeep = []\nwhile True: keep.append(torch.ones(8, 1024, 1024))\n",
        "file-memory",
        "more than 1 GiB of memory while it was imported",
    ),
    "takes all memory in lists": (
        "keep = []\nwhile True: keep.append([0] * 10**7)\n",
        "file-memory",
        "more than 1 GiB of memory while it was imported",
    ),
    "crashes": ("import ctypes\nctypes.string_at(0)\n", "file-crash", "SIGSEGV"),
    "starts threads": (
        "import threading, time\nthreading.Thread(target=lambda: time.sleep(1000)).start()\n"
        "1 / 0\n",
        "file-import",
        "ZeroDivisionError",
    ),
}


@pytest.fixture
def ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that the processes of one test are in."""
    folder = tmp_path / "ours"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def left_over(folder: Path) -> list[str]:
    """Processes of a test's checks that are still there."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and entry.name != str(os.getpid()):
            try:
                found += [entry.name] * ((entry / "cwd").readlink() == folder)
            except OSError:
                continue
    return found


@pytest.mark.skipif(not Path("/proc/self/cwd").exists(), reason="needs /proc")
@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("name", WORST)
def test_the_checker_outlives_the_file(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], ours: Path
) -> None:
    text, rule, message = WORST[name]
    path = tmp_path / "mine.py"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    seconds = 3 if rule == "file-time" else 60
    data = checked(capsys, path, "--timeout", seconds, "--memory", "1")
    assert not data["passed"]
    first = data["findings"][0]
    assert rule in first["rule"], first
    assert re.search(message, first["message"], re.IGNORECASE), first
    assert first["hint"] or rule == "file-syntax"
    assert not left_over(ours)


@pytest.mark.usefixtures("forked")
def test_what_it_said_before_it_ended_is_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "import os\nprint('loading …', flush=True)\nos._exit(3)\n"
    assert main(["check", write(tmp_path, text)]) == 1
    assert "it printed: loading …" in capsys.readouterr().out


def test_a_file_gets_no_secrets_and_a_home_that_is_gone_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    secrets = [
        "HF_TOKEN",
        "AWS_SECRET_ACCESS_KEY",
        "SSH_AUTH_SOCK",
        "OPENAI_API_KEY",
        "MY_PASSWORD",
    ]
    for name in secrets:
        monkeypatch.setenv(name, "a-secret")
    monkeypatch.setenv("LC_TIME", "C.UTF-8")
    known = os.environ.get("PYTHONPATH", "")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'more'}{os.pathsep}{known}")
    text = (
        "import os, sys, tempfile, pathlib\nhere = pathlib.Path(__file__).parent\n"
        "assert 'a-secret' not in os.environ.values(), 'secrets'\n"
        "assert os.environ['LC_TIME'] == 'C.UTF-8'\nassert str(here / 'more') in sys.path\n"
        "(here / 'home').write_text(str(pathlib.Path.home()))\n"
        "(pathlib.Path.home() / 'left').touch()\ntempfile.mkstemp()\n"
        "assert pathlib.Path.home() in pathlib.Path(tempfile.gettempdir(), 'x').parents\n1 / 0\n"
    )
    data = checked(capsys, write(tmp_path, text))
    assert "ZeroDivisionError" in data["findings"][0]["message"]
    home = Path((tmp_path / "home").read_text())
    assert home != Path.home()
    assert not home.exists()


def test_limits_are_positive_and_jobs_end() -> None:
    for name in ("seconds", "memory"):
        with pytest.raises(ValueError, match=f"{name} must be above 0"):
            Limits(**{name: -1.0})
    told: list[float] = []
    done = run("headwise.check.sandbox:_echo", {"text": "here"}, report=told.append)
    assert (done.messages, done.ended, done.code) == ([{"text": "here"}], "done", 0)
    assert told == sorted(told) or len(told) > 1


# --- lessons --------------------------------------------------------------------------------------


def test_every_rule_has_a_lesson(capsys: pytest.CaptureFixture[str]) -> None:
    for rule, row in ALL.items():
        assert explain(rule).startswith(f"{rule}: {row.statement}\n\n")
        assert row.statement.endswith(".")
        assert len(row.lesson) > 40
    assert main(["check", "--explain", "causality"]) == 0
    assert capsys.readouterr().out == explain("causality") + "\n"
    assert "did you mean causality" in refused(capsys, "--explain", "causalty")
    assert "takes no file and no arguments" in refused(capsys, "--explain", "causality", "mine.py")


def test_every_finding_has_its_words() -> None:
    """Ways that the code names are in the table, with a word for every brace; and none is idle."""
    source = Path(__file__).parents[2] / "src" / "headwise" / "check"
    trees = {path: ast.parse(path.read_text("utf-8")) for path in source.rglob("*.py")}
    nodes = [node for tree in trees.values() for node in ast.walk(tree)]
    own = [tree for path, tree in trees.items() if path.parent.name != "steps"]
    calls = [node for tree in own for node in ast.walk(tree) if isinstance(node, ast.Call)]
    named = 0
    for call in calls:
        if isinstance(call.func, ast.Name) and call.func.id == "violation":
            rule, way, *_ = [getattr(argument, "value", None) for argument in call.args]
            given = {keyword.arg for keyword in call.keywords}
            if isinstance(rule, str) and isinstance(way, str):
                words = ALL[rule].ways[way]
                texts = [*Formatter().parse(words["message"]), *Formatter().parse(words["hint"])]
                needed = {re.split(r"[.\[]", field)[0] for _, field, _, _ in texts if field}
                assert None in given or needed <= given, (rule, way)
                named += 1
    assert named > 60
    said = {node.value for node in nodes if isinstance(node, ast.Constant)}
    for rule in ALL.values():
        for way, words in rule.ways.items():
            assert words["message"], (rule.id, way)
            assert way in said, (rule.id, way)


def test_help_shows_an_example_and_the_limits(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--help"]) == 0
    shown = " ".join(re.sub(r"[│╭╮╰╯─]", " ", capsys.readouterr().out).split())
    limits = Limits()
    assert f"[default: {limits.seconds:g}]" in shown
    assert f"[default: {limits.memory:g}]" in shown
    assert "headwise check attention.py:MultiHeadAttention --d_in 24" in shown


# --- the page -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_sessions_of_the_page_are_real(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    ran = []
    for name, text in sessions(PAGE.read_text("utf-8")):
        if name.startswith("In "):
            path, (first, *_) = Path(name[3:]), text.splitlines()
            before, found, after = path.read_text("utf-8").partition(first)
            assert found
            path.write_text(before + text + after[after.index("\n    def ") :], "utf-8")
        elif not name.startswith("$ "):
            Path(name).write_text(text, "utf-8")
        else:
            words = shlex.split(name[2:])
            code = main(words[1:])
            out = capsys.readouterr().out
            assert re.fullmatch(pattern(text), out), f"{name}\n{out}"
            assert (words[0], code) == ("headwise", 1 if "❌" in text else 0), name
            ran.append(name)
    assert len(ran) > 3


def test_a_session_that_is_not_real_is_noticed() -> None:
    shown = "x: right (3 ✅)\n\n[…]\n✅ one: It holds, 0.1234.\n"
    real = "x: right (31 ✅)\n\n✅ two: Yes.\n✅ one: It holds, 0.4321.\n"
    assert re.fullmatch(pattern(shown), real)
    assert not re.fullmatch(pattern(shown), real.replace("holds", "fails"))
    assert not re.fullmatch(pattern(shown), real + "more\n")
