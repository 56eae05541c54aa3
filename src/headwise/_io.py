"""Files that appear whole or not at all, and folders with one writer at a time."""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from torch import Tensor

from ._text import one_line

try:
    import fcntl
except ImportError:  # Windows: two writers are not distinguished there
    fcntl = None

TEMPORARY = ".headwise-*.tmp"
"""Folders of unfinished files."""

LOCK = ".headwise.lock"
"""What the lock of a folder is called."""

_KINDS = {
    stat.S_ISCHR: "a device",
    stat.S_ISBLK: "a device",
    stat.S_ISFIFO: "a pipe",
    stat.S_ISSOCK: "a socket",
}
_NO_LOCKS_HERE = (errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL)


def place_for(path: Path) -> Path:
    """Find the regular file that is, or would be, at `path`, symlinks followed.

    Raises:
        OSError: a folder, a device, a pipe, a socket; the file that standard output goes to; a
            symlink that leads to itself; a file in a folder that there is not.
    """
    try:
        found = path.stat()
    except FileNotFoundError:
        found = None
    except OSError as error:
        raise OSError(f"{path}: no file can be there ({error.strerror})") from None
    if found is not None:
        if stat.S_ISDIR(found.st_mode):
            raise IsADirectoryError(f"{path}: is a folder; name a file in it")
        for kind, name in _KINDS.items():
            if kind(found.st_mode):
                raise OSError(f"{path}: is {name}, and only a file can be replaced; name a file")
        if any(os.path.samestat(found, stream) for stream in _streams()):
            raise OSError(f"{path}: is where this program prints; name another file")
    place = Path(os.path.realpath(path))
    for folder in (path.parent, place.parent):
        if not folder.is_dir():
            raise FileNotFoundError(f"{path}: there is no folder {folder}; create it first")
    return place


_FORMATS = frozenset(
    ".bin .csv .db .htm .html .json .jsonl .npy .npz .parquet .pdf .pickle .pkl .png .pt .pth "
    ".safetensors .sqlite .sqlite3 .svg .tsv .txt .xlsx .yaml .yml .zip".split()
)
"""The suffixes of files of known formats."""


def check_suffix(path: Path, kind: str, own: Sequence[str], instead: str = "") -> None:
    """Raise ValueError where a file of one format would be named as one of another.

    Args:
        kind: what is written there, in words.
        own: how such files end.
        instead: what else to do.
    """
    suffix = path.suffix.lower()
    if suffix in _FORMATS.difference(own):
        more = f", or {instead}" if instead else ""
        raise ValueError(
            f"{path}: {kind} would be written, and the name ends in {suffix}; name it "
            f"{path.with_suffix(own[0]).name!r}{more}."
        )


def _streams() -> Iterator[os.stat_result]:
    """Yield standard output and standard error, as far as they are open."""
    for number in (1, 2):
        with suppress(OSError):
            yield os.fstat(number)


def write_whole(
    folder: Path, writers: Mapping[str, Callable[[Path], object]], *, replace: bool = True
) -> None:
    """Let each writer fill a file elsewhere, then put all of them in place in `folder`.

    When a writer fails, nothing is left of any of them, and what was there before is untouched.
    A symlink stays one: the file that it leads to is replaced.

    Raises:
        OSError: what `place_for` refuses, or the file system; without `replace`, a file that is
            there, even if it came while the writers wrote.
    """
    places = {name: place_for(folder / name) for name in writers}
    with ExitStack() as stack:
        beside = {
            parent: Path(stack.enter_context(_temporary_folder(parent)))
            for parent in {place.parent for place in places.values()}
        }
        parts = {name: beside[place.parent] / place.name for name, place in places.items()}
        for name, write in writers.items():
            mode = _mode(places[name], parts[name])
            write(parts[name])
            parts[name].chmod(mode)  # some libraries make files that only their owner can read
        for name, part in parts.items():
            (os.replace if replace else _put)(part, places[name])


def _temporary_folder(parent: Path) -> TemporaryDirectory[str]:
    """Return a folder in which nobody else writes, on the file system of `parent`."""
    before, after = TEMPORARY.split("*")
    return TemporaryDirectory(after, before, parent)


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write a file of safetensors.

    Raises:
        OSError: it cannot be written.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file(dict(tensors), path, metadata=dict(metadata))
    except SafetensorError as error:
        raise OSError(f"{path.name}: {one_line(error)}") from None


def _put(part: Path, place: Path) -> None:
    """Give the file the name `place` too, if nothing has it: a rename would not ask."""
    try:
        os.link(part, place)
    except FileExistsError:
        raise FileExistsError(f"{place}: is there already, written meanwhile") from None
    except OSError:  # a file system without hard links
        if place.exists():
            raise FileExistsError(f"{place}: is there already, written meanwhile") from None
        os.replace(part, place)


def _mode(place: Path, part: Path) -> int:
    """Make an empty `part`; the permissions of the file that it replaces, or those of a new one."""
    part.touch(exist_ok=False)
    known = place if place.exists() else part
    return stat.S_IMODE(known.stat().st_mode)


def holds_files(folder: Path) -> bool:
    """Return True if there is anything in `folder` besides its lock."""
    return any(one.name != LOCK for one in folder.iterdir())


@contextmanager
def only_writer(folder: Path) -> Iterator[None]:
    """Make `folder` and keep others from writing into it; without a trace if nothing was written.

    The lock is the system's own: it ends with its process, however that ends. What unfinished
    files a killed one has left are removed.

    Raises:
        BlockingIOError: somebody else, process or thread, is writing into the folder.
        OSError: the folder cannot be made or written.
    """
    made = [one for one in (folder, *folder.parents) if not one.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with _locked(folder / LOCK):
            for left in folder.glob(TEMPORARY):
                shutil.rmtree(left, ignore_errors=True)
            yield
    finally:
        with suppress(OSError):  # not empty: something was written
            for one in made:
                one.rmdir()


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the lock on the file `path`, which is there as long as its holder works."""
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            _lock(file, path)
            if path.exists() and os.path.samestat(path.stat(), os.fstat(file)):
                break  # else its last holder has removed it since we opened it
        except BaseException:
            os.close(file)
            raise
        os.close(file)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)  # before it is given back: nobody else can hold it yet
        os.close(file)


def _lock(file: int, path: Path) -> None:
    if fcntl is None:
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise BlockingIOError(
            f"{path.parent}: another run is writing into this folder; wait until it has ended, or "
            f"name another folder"
        ) from None
    except OSError as error:
        if error.errno not in _NO_LOCKS_HERE:  # some network file systems know no locks
            raise
