"""Sessions at a terminal as pages of the docs show them, to be run."""

import re


def sessions(page: str) -> list[tuple[str, str]]:
    """Files and commands of the page in their order: (name, text) and ("$ …", what it prints).

    A name that begins with "In " goes with one method of that file.
    """
    found = []
    block = r"(?:^((?:In )?`\S+`):\n\n)?^```(\w+)\n(.*?)^```$"
    for title, kind, body in re.findall(block, page, re.MULTILINE | re.DOTALL):
        if kind == "console":
            commands = re.split(r"^\$ ", body, flags=re.MULTILINE)[1:]
            found += [(f"$ {command}", text) for command, _, text in map(parted, commands)]
        elif title:
            found.append((title.replace("`", ""), body))
    return found


def parted(command: str) -> tuple[str, str, str]:
    return command.partition("\n")


def pattern(shown: str) -> str:
    """What is shown on the page; `[…]` stands for any lines, and figures may be other figures."""
    parts = []
    for part in re.split(r"^\[…\]\n", shown, flags=re.MULTILINE):
        text = re.sub(r"(?<=[ (])-?\d+\.\d{4}", "FIGURE", part)
        text = re.sub(r"\d+ ✅", "COUNT", text)
        text = re.sub(r"at line \d+ in `forward`: `[^`]*`", "LINE", text)  # of two, either
        text = re.escape(text).replace("FIGURE", r"-?\d+\.\d{4}").replace("COUNT", r"\d+ ✅")
        text = re.sub(r"(?:\\ )+(?=-\?)", r" +", text)  # a sign takes a blank's place
        parts.append(text.replace("LINE", r"at line \d+ in `forward`: `[^`]*`"))
    return r"(?:.*\n)*?".join(parts)
