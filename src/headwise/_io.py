"""Atomic writing of files, and directories with one writer at a time."""

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
except ImportError:  # Windows: directories are not locked
    fcntl = None

TEMPORARY = ".headwise-*.tmp"
"""Pattern of the directories that hold unfinished files."""

LOCK = ".headwise.lock"
"""The name of a directory's lock file."""

_KINDS = {
    stat.S_ISCHR: "a device",
    stat.S_ISBLK: "a device",
    stat.S_ISFIFO: "a pipe",
    stat.S_ISSOCK: "a socket",
}
_NO_LOCKS_HERE = (errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL)


def place_for(path: Path) -> Path:
    """Return the path of the regular file that is, or would be, at `path`, following symlinks.

    Raises:
        OSError: it is a directory, device, pipe or socket, or the file that receives standard
            output or error; a symlink leads to itself; or the directory does not exist.
    """
    try:
        found = path.stat()
    except FileNotFoundError:
        found = None
    except OSError as error:
        raise OSError(f"{path} cannot be written ({error.strerror})") from None
    if found is not None:
        if stat.S_ISDIR(found.st_mode):
            raise IsADirectoryError(f"{path} is a directory; name a file in it")
        for kind, name in _KINDS.items():
            if kind(found.st_mode):
                raise OSError(f"{path} is {name}, and only a file can be replaced; name a file")
        if any(os.path.samestat(found, stream) for stream in _streams()):
            raise OSError(f"{path} receives the output of this program; name another file")
    place = Path(os.path.realpath(path))
    for folder in (path.parent, place.parent):
        if not folder.is_dir():
            raise FileNotFoundError(f"{path}: there is no folder {folder}; create it first")
    return place


_FORMATS = frozenset(
    ".bin .csv .db .htm .html .json .jsonl .npy .npz .parquet .pdf .pickle .pkl .png .pt .pth "
    ".safetensors .sqlite .sqlite3 .svg .tsv .txt .xlsx .yaml .yml .zip".split()
)
"""The file suffixes of known formats."""


def check_suffix(path: Path, kind: str, own: Sequence[str], instead: str = "") -> None:
    """Raise ValueError if a file of one format has the suffix of another.

    Args:
        kind: a description of the content.
        own: the suffixes that this content may have.
        instead: an alternative to suggest in the message.
    """
    suffix = path.suffix.lower()
    if suffix in _FORMATS.difference(own):
        more = f", or {instead}" if instead else ""
        raise ValueError(
            f"{path}: the content is {kind}, but the name ends in {suffix}; name it "
            f"{path.with_suffix(own[0]).name!r}{more}."
        )


def _streams() -> Iterator[os.stat_result]:
    """Yield the status of standard output and standard error, if open."""
    for number in (1, 2):
        with suppress(OSError):
            yield os.fstat(number)


def write_whole(
    folder: Path, writers: Mapping[str, Callable[[Path], object]], *, replace: bool = True
) -> None:
    """Let each writer fill a temporary file, then move all of them into `folder`.

    If a writer fails, no file is written and existing files stay unchanged. A symlink is kept: the
    file that it points to is replaced.

    Raises:
        OSError: raised by `place_for` or the file system; or, without `replace`, a file already
            exists, even if it was created in the meantime.
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
            parts[name].chmod(mode)  # some libraries create files that only their owner can read
        for name, part in parts.items():
            (os.replace if replace else _put)(part, places[name])


def _temporary_folder(parent: Path) -> TemporaryDirectory[str]:
    """Return a private temporary directory on the file system of `parent`."""
    before, after = TEMPORARY.split("*")
    return TemporaryDirectory(after, before, parent)


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write a safetensors file.

    Raises:
        OSError: the file cannot be written.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file(dict(tensors), path, metadata=dict(metadata))
    except SafetensorError as error:
        raise OSError(f"{path.name}: {one_line(error)}") from None


def _put(part: Path, place: Path) -> None:
    """Link the file to `place` if nothing exists there; a rename could overwrite a new file."""
    try:
        os.link(part, place)
    except FileExistsError:
        raise FileExistsError(f"{place} already exists; it was written meanwhile") from None
    except OSError:  # a file system without hard links
        if place.exists():
            raise FileExistsError(f"{place} already exists; it was written meanwhile") from None
        os.replace(part, place)


def _mode(place: Path, part: Path) -> int:
    """Create an empty `part`; return the permissions of the file to replace, or of a new file."""
    part.touch(exist_ok=False)
    known = place if place.exists() else part
    return stat.S_IMODE(known.stat().st_mode)


def holds_files(folder: Path) -> bool:
    """Return True if there is anything in `folder` besides its lock."""
    return any(one.name != LOCK for one in folder.iterdir())


@contextmanager
def only_writer(folder: Path) -> Iterator[None]:
    """Create `folder` and lock it against other writers; remove it if nothing was written.

    The operating system releases the lock when the process ends. Unfinished files left by killed
    processes are removed.

    Raises:
        BlockingIOError: another process or thread is writing into the directory.
        OSError: the directory cannot be created or written.
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
    """Hold a lock on the file `path`; the file exists only while the lock is held."""
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            _lock(file, path)
            if path.exists() and os.path.samestat(path.stat(), os.fstat(file)):
                break  # otherwise the previous holder removed the file after it was opened
        except BaseException:
            os.close(file)
            raise
        os.close(file)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)  # before the lock is released: nobody else can hold it yet
        os.close(file)


def _lock(file: int, path: Path) -> None:
    if fcntl is None:
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise BlockingIOError(
            f"{path.parent}: another run is writing into this directory; wait until it ends, or "
            f"name another directory"
        ) from None
    except OSError as error:
        if error.errno not in _NO_LOCKS_HERE:  # some network file systems have no locks
            raise
