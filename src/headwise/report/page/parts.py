"""Write pages: one file from a template, with the data packed in it."""

from __future__ import annotations

import html
import importlib.metadata
import json
import os
import re
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from headwise._io import place_for, write_whole
from headwise.report.codec import gzip_b64


class PageError(ValueError):
    """Raised if a page cannot be written; the message names the path and a fix."""


def check_out(path: str | os.PathLike[str]) -> Path:
    """Return the path for a page, or raise `PageError` if no page can be written there.

    Call it before the slow part, so that a wrong `--out` costs nothing.
    """
    path = Path(path)
    try:
        place_for(path)
    except OSError as error:
        raise PageError(f"cannot write {error}") from None
    return path


def write_html(path: Path, text: str) -> Page:
    """Write a page's text, completely or not at all.

    Raises `PageError` if the folder cannot be written.
    """
    try:
        write_whole(path.parent, {path.name: lambda part: part.write_bytes(text.encode("utf-8"))})
    except OSError as error:
        raise PageError(f"cannot write {path}: {error.strerror or error}") from error
    return Page(path)


FRAME_HEIGHT = 860
"""The height of a page in a notebook, in pixels."""


class Page(type(Path())):
    """The path of a page; notebooks show the page itself."""

    def _repr_html_(self) -> str:
        return framed(self.read_text("utf-8"))


def framed(page: str) -> str:
    """Return a page in an iframe, as notebooks show it."""
    return (
        f'<iframe srcdoc="{html.escape(page)}" title="headwise" width="100%" '
        f'height="{FRAME_HEIGHT}" style="border:0" allow="clipboard-write"></iframe>'
    )


def fill(template: str, parts: Mapping[str, str]) -> str:
    """Fill a template: `@@name@@` is replaced by the part of that name.

    This is a single pass: inserted text is not searched for further marks.
    """
    return re.sub(r"@@(\w+)@@", lambda mark: parts[mark[1]], template)


def packed(results: Any) -> str:
    """Return a script element, never executed, that holds results as compressed JSON."""
    # A lone surrogate cannot be encoded in UTF-8; JSON has an escape for it.
    content = _json(results).encode("utf-8", "backslashreplace")
    return f'<script type="text/plain" id="results">{gzip_b64(content)}</script>'


def json_text(value: Any) -> str:
    """Return JSON that cannot close the script element that contains it."""
    text = _json(value)
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def part(name: str) -> str:
    """Read a file in this folder."""
    return resources.files(__package__ or "").joinpath(name).read_text("utf-8")


def version(package: str) -> str:
    """Return the version of a package; `unknown` if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
