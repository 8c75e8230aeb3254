"""Files of settings, as systemd reads them: `NAME='value'`, comments, nothing is expanded.

They are the operator's. A setting that is missing is added at the end, one that was asked for now is
replaced in its line, and all else stays as it is.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final

LINE: Final = re.compile(r"^\s*([A-Za-z_][A-Za-z0-9_]*)=(.*?)\s*$")


class Unquotable(Exception):
    """A value that a file of settings cannot have."""


def read(path: Path) -> dict[str, str]:
    """The settings of a file; none if there is no such file."""
    return parse(path.read_text()) if path.is_file() else {}


def parse(text: str) -> dict[str, str]:
    found = {}
    for line in text.splitlines():
        if match := LINE.match(line):
            found[match[1]] = _unquoted(match[2])
    return found


def merged(text: str, missing: Mapping[str, str], asked: Mapping[str, str], title: str) -> str:
    """The text with these settings. `asked`: replace what is there; `missing`: do not.

    Raises Unquotable.
    """
    there = parse(text)
    lines = text.splitlines() or [f"# {title}", "# Yours to change: what is set here is kept."]
    for name, value in asked.items():
        if name in there and there[name] != value:
            lines = [_line(name, value) if _names(line, name) else line for line in lines]
    lines += [_line(name, value) for name, value in {**missing, **asked}.items() if name not in there]
    return "\n".join(lines) + "\n"


def _names(line: str, name: str) -> bool:
    match = LINE.match(line)
    return match is not None and match[1] == name


def _line(name: str, value: str) -> str:
    if "'" in value or "\n" in value:
        raise Unquotable(f"{name} has a quote or a line break.")
    return f"{name}='{value}'"


def _unquoted(text: str) -> str:
    """Escapes are left alone: none of our settings has one."""
    for quote in ("'", '"'):
        if len(text) > 1 and text[0] == text[-1] == quote:
            return text[1:-1]
    return text
