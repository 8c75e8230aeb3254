"""The command reference of docs/tidegatectl.md, made of the parser: `make docs` writes it."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Final

from console.ctl.arguments import parser
from console.ctl.completion import actions_of, subparsers_of
from console.ctl.examples import EXAMPLES
from console.ctl.failures import MEANINGS
from console.ctl.resources import RESOURCES

BEGINS: Final = "## Exit codes\n"
_EVERYWHERE: Final = ("--help", "--context", "--request-timeout")


def reference() -> str:
    """From the heading of exit codes to the end of the page."""
    codes = "".join(f"| {int(code)} | {meaning} |\n" for code, meaning in MEANINGS.items())
    kinds = "".join(
        f"| `{one.plural}`{f', `{one.short}`' if one.short else ''} | {one.text} | "
        f"{'yes' if one.is_applied else ''} | {'yes' if one.delete else ''} | "
        f"{', '.join(f'`{verb}`' for verb in one.actions)} |\n"
        for one in RESOURCES
    )
    return "\n".join(
        (
            f"{BEGINS}\n| code | meaning |\n|---|---|\n{codes}",
            f"## Resources\n\n| kind | what | apply | delete | actions |\n{'|---' * 5}|\n{kinds}",
            "## Commands\n\nThis part of the page is made by `make docs`. All commands have `--help`,",
            "`--context NAME` and `--request-timeout DURATION`, which may be before the command.\n",
            *_commands(parser(), "tidegatectl"),
        )
    )


def _commands(one: argparse.ArgumentParser, name: str) -> Iterator[str]:
    for word, inner in subparsers_of(one).items():
        whole = f"{name} {word}"
        if subparsers_of(inner):
            yield from _commands(inner, whole)
            continue
        example = f"{whole} {EXAMPLES[whole.removeprefix('tidegatectl ')]}".rstrip()
        yield f"### `{whole}`\n\n{inner.description} For example: `{example}`\n"
        yield f"```\n{whole}{_arguments(inner)}\n```\n"
        options = "".join(_options(inner))
        yield f"| option | meaning |\n|---|---|\n{options}" if options else ""


def _arguments(one: argparse.ArgumentParser) -> str:
    places = [action for action in actions_of(one) if not action.option_strings]
    return "".join(f" {_place(action)}" for action in places) + " [options]"


def _place(action: argparse.Action) -> str:
    name = str(action.metavar or "|".join(map(str, action.choices or [action.dest.upper()])))
    match action.nargs:
        case "?":
            return f"[{name}]"
        case "*":
            return f"[{name} ...]"
        case "+":
            return f"{name} ..."
    return name


def _options(one: argparse.ArgumentParser) -> Iterator[str]:
    for action in actions_of(one):
        if not action.option_strings or action.option_strings[-1] in _EVERYWHERE:
            continue
        value = (
            "" if action.nargs == 0 else f" {action.metavar or '|'.join(map(str, action.choices or ()))}"
        )
        value = value.replace("|", "\\|")
        names = [f"`{name}{value}`" for name in action.option_strings]
        yield f"| {', '.join(names)} | {action.help} |\n"
