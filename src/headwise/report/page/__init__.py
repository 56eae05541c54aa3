"""Pages: write data as one HTML file that needs neither a network nor other files."""

from .parts import PageError, check_out
from .report import render_page, write_page

__all__ = ["PageError", "check_out", "render_page", "write_page"]
