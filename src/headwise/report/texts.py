"""Many texts, read one at a time: the lines of a file, or the files of a folder."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..models.corpus import TextError


class Texts:
    """The texts of a file, one a line, blank lines left out; or of a folder's `.txt` files, by
    name, each of them one text.

    Raises:
        TextError: no such file or folder, no text in it, or one that is not UTF-8.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._files = sorted(self.path.glob("*.txt")) if self.path.is_dir() else None
        self._number = sum(1 for _ in self._lines()) if self._files is None else len(self._files)
        if not self._number:
            there = "no .txt file in this folder" if self._files == [] else "the text is empty"
            raise TextError(f"{self.path}: {there}")

    def __len__(self) -> int:
        return self._number

    def __iter__(self) -> Iterator[str]:
        return self._lines() if self._files is None else map(_whole, self._files)

    def _lines(self) -> Iterator[str]:
        with _told(self.path), self.path.open(encoding="utf-8-sig") as file:
            for line in file:
                if line.strip():
                    yield line.rstrip("\n")


def _whole(path: Path) -> str:
    with _told(path):
        return path.read_text(encoding="utf-8-sig")


@contextmanager
def _told(path: Path) -> Iterator[None]:
    """What goes wrong in reading, as a `TextError`."""
    try:
        yield
    except FileNotFoundError:
        raise TextError(f"{path}: no such file or folder") from None
    except UnicodeDecodeError as error:
        raise TextError(
            f"{path}: not UTF-8 ({error.reason}); convert it first, for example with "
            f"iconv -f latin1 -t utf8"
        ) from None
    except OSError as error:
        raise TextError(f"{path}: cannot be read ({error.strerror})") from None
