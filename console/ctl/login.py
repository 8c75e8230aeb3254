"""Contexts on the command line: log in, list them, use one."""

from __future__ import annotations

import argparse
import getpass
import os
import sys
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import msgspec

from console.ctl import contexts
from console.ctl.client import Client
from console.ctl.contexts import CONTEXT, TOKEN
from console.ctl.failures import Usage
from console.ctl.output import Screen

TOKEN_BYTES_MAX: Final = 16 << 10
STDIN: Final = "-"


class _Me(msgspec.Struct):
    username: str
    read_only: bool


def log_in(given: argparse.Namespace, screen: Screen) -> None:
    """Store a context, if the console accepts its token."""
    context = contexts.made(given.address, _token(given.token_file), given.ca, plain=given.plain)
    name = given.name or urlsplit(context.address).netloc
    with Client(context, given.request_timeout) as client:
        me = client.as_kind(client.get("/me"), _Me)
    contexts.store(name, context)
    rights = "read" if me.read_only else "read and write"
    screen.say(f"Logged in to {context.address} as {me.username}, who may {rights}. Context: {name}")


def _token(path: str | None) -> str:
    """From where it is said to be, else from the environment, else from standard input, where a person
    is asked. In this order, since a job's standard input may be a pipe that nobody writes to."""
    known = "" if path else os.environ.get(TOKEN, "")
    if path == STDIN or (path is None and not known and not sys.stdin.isatty()):
        return sys.stdin.readline(TOKEN_BYTES_MAX).strip()
    if path:
        try:
            with Path(path).open() as file:
                return file.read(TOKEN_BYTES_MAX).strip()
        except (OSError, UnicodeDecodeError) as error:
            raise Usage(f"{path} can't be read: {error}.") from error
    return known or getpass.getpass("Token or JWT: ").strip()


def contexts_of(given: argparse.Namespace, screen: Screen) -> None:
    if given.verb != "list" and not given.name:
        raise Usage(f"Say which context to {given.verb}.")
    match given.verb:
        case "use":
            contexts.use(given.name)
            screen.say(f"{given.name} is used from now on.")
        case "remove":
            contexts.remove(given.name)
            screen.say(f"{given.name} is removed. Its token is still valid: revoke it in the console.")
        case _:
            known = contexts.read()
            current = os.environ.get(CONTEXT) or known.current
            for name, context in sorted(known.contexts.items()):
                screen.say(f"{'*' if name == current else ' '} {name}   {context.address}")
            if not known.contexts:
                screen.say(contexts.LOG_IN)
