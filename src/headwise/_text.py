"""Text that others chose: whether it is one, and names made fit to be shown."""

from __future__ import annotations


def escaped(text: object) -> str:
    r"""The text with an escape for each character that is not printable, as `repr` has it.

    So no name moves the cursor, colours the terminal, ends a line, or fails to be encoded.

    >>> print(escaped("naïve\x1b[31m\n" + "\udcff"))  # the last is a byte that is no UTF-8
    naïve\x1b[31m\n\udcff
    """
    return "".join(
        one if one.isprintable() else one.encode("unicode_escape").decode() for one in str(text)
    )


def must_be_text(text: str, name: str) -> None:
    """Check that a string can be encoded.

    Raises:
        ValueError: it has lone surrogates, as Python has for bytes that are no UTF-8.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        at = f"{escaped(text[error.start])} at {error.start}"
        raise ValueError(f"{name} is no text: {at} stands for a byte that is no UTF-8") from None
