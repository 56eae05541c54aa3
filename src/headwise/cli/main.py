"""The command line: `headwise look`, `trace`, `timeline`, `check`, `convert`, `ladder`, `train`
and `generate`.

Exit codes: 0 success, 1 a mistake was found, 2 bad input (one line on standard error gives the
reason and a fix), 130 stopped with Ctrl-C.
"""

from __future__ import annotations

import io
import sys
from typing import Annotated, Any

import typer

from .._text import escaped, one_line
from .check import check, choices
from .convert import convert
from .generate import generate
from .ladder import ladder
from .look import look
from .terminal import STOPPED, ignore_broken_pipe
from .timeline import timeline
from .trace import trace
from .train import train

app = typer.Typer(
    name="headwise",
    help="Multi-head attention whose heads you can see.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)
for command in (look, trace, ladder, train, generate, timeline, convert):
    app.command()(command)
app.command(context_settings={"ignore_unknown_options": True})(check)


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    usage_error = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")
    code: Any = 0
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # for characters it cannot encode
    try:
        command = _without_flag_metavars(typer.main.get_command(app))
        with ignore_broken_pipe():
            code = command.main(arguments, "headwise", standalone_mode=False)
    except SystemExit:  # raised by typer after a broken pipe
        return 0
    except (KeyboardInterrupt, typer.Abort):
        return STOPPED
    except (ValueError, OSError) as error:
        return _bad_input(str(error))
    except Exception as error:
        if isinstance(error, MemoryError) or "allocate memory" in str(error):
            return _bad_input(f"not enough memory ({error!r:.200})")
        if not isinstance(error, usage_error):
            raise
        if type(error).__name__ == "NoArgsIsHelpError":
            with ignore_broken_pipe():
                print(error.format_message())  # pyright: ignore[reportAttributeAccessIssue]
            return 0
        return _bad_input(*_usage_message(error))
    return code if isinstance(code, int) else 0


def _without_flag_metavars(command: Any) -> Any:
    """Remove the value's type from flags in the help of commands: flags take no value."""
    for one in (command, *getattr(command, "commands", {}).values()):
        for parameter in one.get_params(typer.Context(one)):
            if getattr(parameter, "is_flag", False):
                parameter.metavar = ""
    return command


def _usage_message(error: Any) -> list[str]:
    """Return typer's message with a hint: the values of an option, or the use of --text."""
    message: str = error.format_message()
    if "requires an argument" in message and (listed := choices(getattr(error, "option_name", ""))):
        return listed
    command = getattr(getattr(error, "ctx", None), "command", None)
    names = [name for one in getattr(command, "params", ()) for name in one.opts]
    if "extra argument" in message and "--text" in names:
        message += ": put --text before a text, and --model before a model"
    return [message]


def _bad_input(message: str, *more: str) -> int:
    print("\n".join([f"headwise: {escaped(one_line(message))}", *more]), file=sys.stderr)
    return 2


def _version(requested: bool | None) -> None:
    if requested:
        from .. import __version__

        print(f"headwise {__version__}")
        raise typer.Exit


@app.callback()
def _app(
    version: Annotated[
        bool | None,
        typer.Option("--version", callback=_version, is_eager=True, help="Print the version."),
    ] = None,
) -> None:
    """Multi-head attention whose heads you can see."""
