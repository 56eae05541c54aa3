"""What the native library holds and needs, what wheels hold, and installs without a compiler."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

from ci import in_ci
from headwise.kernels import ctypes_api as cpu

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "headwise"
NATIVE = PACKAGE / "kernels" / "cpp"

BEST_FIRST = ["amx", "avx512bf16", "avx512", "avx2", "neonbf16", "sve256", "neon", "plain"]


def missing(what: str) -> None:
    """Skips the test; under CI, fails it."""
    (pytest.fail if in_ci() else pytest.skip)(what)


def run(*command: str | Path, **settings: str) -> subprocess.CompletedProcess[str]:
    """Run a command in the checkout, with no settings of the build but these."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("SKBUILD_", "CMAKE_"))}
    return subprocess.run(
        [str(part) for part in command],
        cwd=ROOT,
        env=env | settings,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


# ── the library ─────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def library() -> Path:
    loaded = cpu.library()
    if loaded is None:
        missing(cpu.why_not())
        raise AssertionError
    return Path(loaded.handle._name)


def test_the_library_has_its_units_best_first(library: Path) -> None:
    loaded = cpu.library()
    assert loaded is not None
    assert list(loaded.sets) == [name for name in BEST_FIRST if name in loaded.sets]
    assert loaded.sets[-1] == "plain"
    assert loaded.here[-1], "plain code runs everywhere"


def test_the_header_and_the_struct_are_of_one_version(library: Path) -> None:
    header = (NATIVE / "headwise.h").read_text()
    assert re.findall(r"^#define HW_INTERFACE (\d+)$", header, re.M) == [str(cpu.INTERFACE)]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_library_needs_nothing_but_the_runtime_of_c_and_cpp(library: Path) -> None:
    code = """
import ctypes, sys
def libraries():
    words = (line.split()[-1].rpartition("/")[2] for line in open("/proc/self/maps"))
    return {word.partition(".so")[0] for word in words if ".so" in word}
before = libraries()
ctypes.CDLL(sys.argv[1])
print(*(libraries() - before))
"""
    done = run(sys.executable, "-c", code, library)
    loaded = set(done.stdout.split())
    assert library.name.partition(".so")[0] in loaded, done.stderr
    assert loaded <= {"libheadwise", "libc", "libm", "libpthread", "libstdc++", "libgcc_s"}


def symbols(*options: str | Path) -> list[tuple[str, str]]:
    """What `nm` prints: the kind and the name of every symbol."""
    if not shutil.which("nm"):
        missing("nm is not installed: on Debian, apt install binutils")
    done = run("nm", "--demangle", *options)
    assert done.returncode == 0, done.stderr
    rows = re.findall(r"^[0-9a-f ]{16} (\w) (.+)$", done.stdout, re.M)
    assert rows, f"nm {options} found nothing"
    return rows


@pytest.mark.skipif(sys.platform != "linux", reason="other systems name symbols otherwise")
def test_the_library_shows_its_interface_and_nothing_else(library: Path) -> None:
    declared = set(re.findall(r"\b(hw_\w+)\(", (NATIVE / "headwise.h").read_text()))
    shown = {name for _, name in symbols("--dynamic", "--defined-only", library)}
    assert shown == declared


def test_no_unit_lends_code_to_another() -> None:
    """What several units define the linker takes from one of them: from the widest, for all."""
    objects = sorted((ROOT / "build/native/CMakeFiles").glob("unit_*.dir/unit.cpp.o"))
    if not objects:
        missing("the units were not compiled here: make native")
    for path in objects:
        isa = path.parent.name.removeprefix("unit_").removesuffix(".dir")
        shared = {name for kind, name in symbols(path) if kind in "WVu"}
        lent = {name for name in shared if f"{isa}::" not in name and "DW.ref" not in name}
        assert not lent, f"{isa} shares {lent}: put them into the namespace HW_ISA"


# ── wheels ──────────────────────────────────────────────────────────────────────────────────────


def build(folder: Path, asked: str = "", **settings: str) -> subprocess.CompletedProcess[str]:
    """Build a wheel as pip does; `asked` is the value of --config-settings=wheel.cmake."""
    pytest.importorskip("scikit_build_core.build")
    code = "import sys; from scikit_build_core.build import build_wheel as build; "
    code += "build(sys.argv[1], {'wheel.cmake': sys.argv[2]} if sys.argv[2] else None)"
    return run(sys.executable, "-c", code, folder, asked, **settings)


def contents(folder: Path) -> set[str]:
    """The files of the package in the only wheel of a folder."""
    (wheel,) = folder.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    return {name for name in names if name.startswith("headwise/") and not name.endswith("/")}


def package() -> set[str]:
    """The files of the package in the checkout, without what builds the library."""
    files = (path for path in PACKAGE.rglob("*") if path.is_file())
    kept = (path for path in files if "__pycache__" not in path.parts)
    kept = (path for path in kept if NATIVE not in path.parents)
    kept = (path for path in kept if "libheadwise" not in path.name)
    return {f"headwise/{path.relative_to(PACKAGE).as_posix()}" for path in kept}


@pytest.mark.slow
def test_a_wheel_holds_the_whole_package(tmp_path: Path) -> None:
    done = build(tmp_path, "false")
    assert done.returncode == 0, done.stdout + done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["headwise-0.1.0-py3-none-any.whl"]
    found = contents(tmp_path)
    assert found == package()
    assert {"headwise/py.typed", "headwise/models/builtin/model.safetensors"} <= found


def compiler(folder: Path, script: str) -> str:
    """A compiler that does as this script says with `real "$@"`, the real one."""
    real = shutil.which("c++")
    if real is None:
        missing("no C++ compiler was found")
    path = folder / "c++"
    path.write_text(f'#!/bin/sh\nreal() {{ exec {real} "$@"; }}\n{script}\n')
    path.chmod(0o755)
    return str(path)


OLD = 'real -U__GNUC__ -D__GNUC__=9 -U__clang_major__ -D__clang_major__=9 "$@"'
BROKEN = 'case "$*" in *unit.cpp*) exit 1;; esac; real "$@"'


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "reason"),
    [
        (None, "no C++ compiler was found"),
        (OLD, "is too old"),
        (BROKEN, "CMake build failed"),
    ],
    ids=["none", "old", "broken"],
)
def test_without_a_fit_compiler_the_wheel_is_pure_python(
    tmp_path: Path, script: str | None, reason: str
) -> None:
    chosen = "/nowhere/c++" if script is None else compiler(tmp_path, script)
    wheels = tmp_path / "wheels"
    done = build(wheels, CXX=chosen)
    said = " ".join((done.stdout + done.stderr).split())
    assert done.returncode == 0, said
    assert reason in said
    assert said.count("no native library: it was not built, for the reason above") == 1
    assert [path.name for path in wheels.iterdir()] == ["headwise-0.1.0-py3-none-any.whl"]
    assert contents(wheels) == package()


def test_a_library_that_was_asked_for_is_not_left_out(tmp_path: Path) -> None:
    done = build(tmp_path, "true", CXX="/nowhere/c++")
    assert done.returncode != 0
    assert not list(tmp_path.glob("*.whl"))


def configure(folder: Path, *options: str, **settings: str) -> subprocess.CompletedProcess[str]:
    pytest.importorskip("cmake")
    command = ("cmake", "-G", "Ninja", "--log-level=NOTICE", "-S", NATIVE, "-B", folder)
    path = f"{sysconfig.get_path('scripts')}{os.pathsep}{os.environ['PATH']}"
    return run(*command, *options, PATH=path, **settings)


def test_no_compiler_is_said_in_one_line(tmp_path: Path) -> None:
    done = configure(tmp_path, CXX="/nowhere/c++")
    assert done.returncode == 0
    said = done.stderr.strip().splitlines()
    assert len(said) == 1
    assert said[0].startswith("no native library: no C++ compiler was found")


def test_a_unit_that_the_compiler_cannot_build_is_left_out(tmp_path: Path) -> None:
    if sysconfig.get_platform() != "linux-x86_64":
        pytest.skip("leaves out a unit of x86-64")
    refuse = 'case "$*" in *-mavx512bf16*) exit 1;; esac; real "$@"'  # amx has it, too
    done = configure(tmp_path, CXX=compiler(tmp_path, refuse))
    assert "goes without avx512bf16" in done.stderr
    units = re.findall(r"HW_UNIT\((\w+)\)", (tmp_path / "units.inc").read_text())
    assert units == ["avx512", "avx2", "plain"]


@pytest.mark.slow
def test_the_built_wheel_works_where_there_is_no_compiler(tmp_path: Path) -> None:
    """`make wheel` made it. PyTorch and the like are those of this environment."""
    wheels = list((ROOT / "dist").glob("*.whl"))
    sources = [path for path in PACKAGE.rglob("*") if path.suffix in {".py", ".cpp", ".hpp", ".h"}]
    if not wheels or wheels[0].stat().st_mtime < max(path.stat().st_mtime for path in sources):
        missing("there is no wheel of these sources: make wheel")
    (wheel,) = wheels
    assert "-linux_" not in wheel.name, "auditwheel names the glibc that it needs"
    (library,) = contents(ROOT / "dist") - package()
    assert library.startswith("headwise/kernels/libheadwise.")

    venv.create(tmp_path / "fresh", symlinks=True)
    python = tmp_path / "fresh" / "bin" / "python"
    install = ("-m", "pip", "--python", python, "install", "--no-deps", "--no-index", wheel)
    done = run(sys.executable, *install)
    assert done.returncode == 0, done.stderr
    (site,) = (tmp_path / "fresh").glob("lib/python*/site-packages")
    (site / "others.pth").write_text(sysconfig.get_path("purelib"))
    code = """
import torch, headwise as hw
from headwise.kernels import ctypes_api as cpu
assert cpu.library(), cpu.why_not()
q, k = torch.randn(2, 6, 7, 5), torch.randn(2, 3, 11, 5)
found = hw.attend(q, k, k, mask=hw.Causal(), backend="native")
torch.testing.assert_close(found, hw.attend(q, k, k, mask=hw.Causal(), backend="eager"))
print(cpu.library().handle._name)
"""
    command = [str(python), "-c", code]
    used = subprocess.run(
        command, cwd=tmp_path, env={}, capture_output=True, text=True, check=False
    )
    assert used.returncode == 0, used.stderr
    assert Path(used.stdout.strip()) == site / library
