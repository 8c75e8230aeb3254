"""What goes to the terminal, or into a pipe: tables, documents, colours and progress."""

from __future__ import annotations

import os
import re
import shutil
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, TextIO

import msgspec
import yaml
from rich.cells import cell_len, set_cell_size

from console.ctl.cells import form_of, moment, printable, shown, spoken, style_of
from console.ctl.resources import Column, Resource, label_of, value_at

GAP: Final = "   "
CELL_MIN: Final = 8
_CODES: Final = {"green": "32", "yellow": "33", "red": "31", "bold": "1", "dim": "2", "cyan": "36"}
Item = dict[str, Any]


class Screen:
    """Where results go. Colour, and a table that fits, only where a person looks at a terminal.

    `NO_COLOR` and `TERM=dumb` are understood. A pipe gets whole lines without colour."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self.stream = stream or sys.stdout
        self.is_terminal = self.stream.isatty()
        self.encoding = self.stream.encoding or "utf-8"
        plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
        self.has_colour = self.is_terminal and not plain

    @property
    def width(self) -> int | None:
        return shutil.get_terminal_size().columns if self.is_terminal else None

    def say(self, text: str, style: str = "") -> None:
        self._write(self.styled(text, style))

    def _write(self, line: str) -> None:
        self.stream.write(line + "\n")
        self.stream.flush()

    def styled(self, text: str, style: str) -> str:
        text = spoken(text, self.encoding)
        return f"\x1b[{_CODES[style]}m{text}\x1b[0m" if style and self.has_colour else text

    def rows(
        self,
        rows: Iterable[Sequence[str]],
        widths: Sequence[int],
        states: Sequence[int] = (),
        style: str = "",
    ) -> None:
        for row in rows:
            cells = []
            for place, (text, width) in enumerate(zip(row, widths, strict=True)):
                is_last = place == len(row) - 1
                cell = _cut(text, width, fill=not is_last)
                cells.append(self.styled(cell, style_of(text) if place in states else style))
            self._write(GAP.join(cells).rstrip() if not self.has_colour else GAP.join(cells))

    def document(self, form: str, items: Sequence[Item], *, is_list: bool) -> None:
        """As JSON (an array for a list) or as YAML (a document for each)."""
        if form == "json":
            value = list(items) if is_list else items[0]
            text = msgspec.json.format(msgspec.json.encode(value), indent=2).decode()
            if not self.encoding.lower().replace("-", "").startswith("utf"):
                text = "".join(
                    one if ord(one) < 128 else _escaped(one) for one in text
                )  # all are in strings
            self.stream.write(text + "\n")
        else:
            self.stream.write("---\n".join(_yaml(item, self.encoding) for item in items))
        self.stream.flush()

    def listing(
        self, resource: Resource, items: Sequence[Item], *, wide: bool = False, has_headings: bool = True
    ) -> None:
        """A table of items, with the columns of their resource."""
        columns = resource.shown(wide=wide)
        rows = [row_of(columns, item, time.time()) for item in items]
        states = [place for place, column in enumerate(columns) if column.form == "state"]
        headings = [[column.heading for column in columns]] if has_headings else []
        widths = fitting(widths_of([*headings, *rows]), self.width)
        self.rows(headings, widths, style="bold")
        self.rows(rows, widths, states)

    def described(self, item: Mapping[str, Any], indent: int = 0) -> None:
        """All fields, the nested ones below their names."""
        now = time.time()
        labels = {name: f"{_heading(name, value)}:" for name, value in item.items()}
        width = max((len(label) for label in labels.values()), default=0) + 2
        for name, value in item.items():
            label = " " * indent + labels[name]
            if isinstance(value, dict) and value:
                self.say(label)
                self.described(value, indent + 2)
            elif isinstance(value, list) and value and all(isinstance(one, dict) for one in value):
                self.say(label)
                self._nested(value, indent + 2)
            elif isinstance(value, str) and "\n" in value:
                self.say(label)
                for line in value.splitlines():
                    self.say(" " * (indent + 2) + printable(line))
            else:
                form = form_of(name)
                is_moment = form == "age" and isinstance(value, str)
                text = moment(value, now) if is_moment else shown(value, form, now)
                self._write(
                    self.styled(label.ljust(indent + width), "") + self.styled(text, style_of(text))
                )

    def _nested(self, items: list[Item], indent: int) -> None:
        """A table of what is flat, and else one after the other."""
        names = list(items[0])
        if all(list(one) == names and not any(map(_is_nested, one.values())) for one in items):
            now = time.time()
            rows = [[shown(one[name], form_of(name), now) for name in names] for one in items]
            headings = [label_of(name).upper() for name in names]
            lines = [headings, *rows]
            widths = fitting(widths_of(lines), self.width and self.width - indent)
            for row in lines:
                cells = [_cut(cell, width, fill=True) for cell, width in zip(row, widths, strict=True)]
                self.say(" " * indent + GAP.join(cells).rstrip())
            return
        for number, one in enumerate(items):
            if number:
                self.say("")
            self.described(one, indent)


def row_of(columns: Sequence[Column], item: Item, now: float) -> list[str]:
    return [
        shown(value_at(item, column.path), column.form or form_of(column.path), now)
        for column in columns
    ]


def widths_of(lines: Sequence[Sequence[str]]) -> list[int]:
    return [max(map(cell_len, column)) for column in zip(*lines, strict=True)]


def fitting(widths: Sequence[int], room: int | None) -> list[int]:
    """These widths, the widest cut where there is not so much room. The first column has names, and is
    never cut: a narrow terminal rather breaks lines."""
    if room is None:
        return list(widths)
    found = [*widths[:1], *(min(width, room) for width in widths[1:])]
    excess = sum(found) + len(GAP) * (len(found) - 1) - room
    while excess > 0 and any(width > CELL_MIN for width in found[1:]):
        widest = max(range(1, len(found)), key=found.__getitem__)
        found[widest] -= 1
        excess -= 1
    return found


def _cut(text: str, width: int, *, fill: bool) -> str:
    length = cell_len(text)
    if length > width:
        return set_cell_size(text, width - 1) + "…"
    return text + " " * (width - length) if fill else text


def _heading(name: str, value: object) -> str:
    is_nested = isinstance(value, dict)  # only values have units
    text = name.replace("_", " ") if is_nested else label_of(name)
    return text[:1].upper() + text[1:]


def _is_nested(value: object) -> bool:
    return (
        isinstance(value, dict | list) and bool(value) and not all(isinstance(one, str) for one in value)
    )


def _escaped(sign: str) -> str:
    return "".join(f"\\u{unit:04x}" for unit in memoryview(sign.encode("utf-16-le")).cast("H"))


OTHER_BREAKS: Final = frozenset("\x85\u2028\u2029")  # what YAML ends a line with, too


# PyYAML takes 1e30 for a text, as YAML 1.1 had it; people mean a number.
WITH_EXPONENT: Final = (
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)[eE][-+]?[0-9]+$"),
    list("-+.0123456789"),
)


class _Dumper(yaml.SafeDumper):
    """Texts of several lines as blocks."""


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    style = "|" if "\n" in text else None
    if OTHER_BREAKS & set(text):
        style = '"'  # written as they are, they would be read as white space
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text)
_Dumper.add_implicit_resolver(*WITH_EXPONENT)


def _yaml(item: object, encoding: str = "utf-8") -> str:
    is_unicode = encoding.lower().replace("-", "").startswith("utf")
    return str(yaml.dump(item, Dumper=_Dumper, sort_keys=False, allow_unicode=is_unicode, width=100))


def yaml_of(item: object) -> str:
    return _yaml(item)
