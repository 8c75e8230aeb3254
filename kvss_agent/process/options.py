"""Settings of a process: flags, or environment variables of the same names. Parsed strictly."""

from __future__ import annotations

import argparse
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final, TypeVar
from urllib.parse import urlsplit

from kvss_agent.process.durable_file import write_durably
from telemetry import redis_address
from telemetry.service_links import HINT, is_service_link

TOKEN_CHARACTERS_MIN: Final = 20

T = TypeVar("T")


class WrongSettings(Exception):
    """A sentence for each setting that is wrong."""


class Options:
    """What was given, and what is wrong with it. A flag wins over the environment."""

    def __init__(
        self,
        parser: argparse.ArgumentParser,
        prefix: str,
        arguments: Sequence[str],
        environment: Mapping[str, str],
    ) -> None:
        names = [action.dest for action in parser._actions if action.dest != "help"]  # noqa: SLF001
        values = vars(parser.parse_args(arguments))
        self._given = {name: value for name, value in values.items() if value is not None}
        self.problems: list[str] = []
        self.has_made_token = False
        for variable, value in environment.items():
            if variable.startswith(prefix):
                name = variable.removeprefix(prefix).lower()
                if name in names:
                    self._given.setdefault(name, value)
                else:
                    hint = f" {HINT}" if is_service_link(variable, value) else ""
                    self.problems.append(f"{variable} is not a setting.{hint}")

    def take(
        self, name: str, default: T, convert: Callable[[str], T], allowed: str, *, secret: bool = False
    ) -> T:
        if name not in self._given:
            return default
        try:
            return convert(self._given[name])
        except (ValueError, KeyError) as error:
            flag = name.replace("_", "-")
            shown = "(hidden)" if secret else repr(self._given[name])
            why = f" {error}" if isinstance(error, redis_address.WrongAddress) else ""
            self.problems.append(f"--{flag} is {shown}: it should be {allowed}.{why}")
            return default

    def readable(self, name: str) -> Path | None:
        return self.take(name, None, file, "a file that can be read")

    def pair(self, certificate: str, key: str) -> tuple[Path | None, Path | None]:
        """The files of a certificate and its key. One without the other is a problem."""
        found = self.readable(certificate), self.readable(key)
        if (found[0] is None) != (found[1] is None):
            flags = [f"--{name.replace('_', '-')}" for name in (certificate, key)]
            self.problems.append(f"{flags[0]} and {flags[1]} belong together.")
        return found

    def is_yes(self, name: str, *, default: bool = False) -> bool:
        return self.take(name, default, {"yes": True, "no": False}.__getitem__, "yes or no")

    def count(self, name: str, default: int, high: int, *, low: int = 1) -> int:
        def counted(text: str) -> int:
            if not low <= int(text) <= high:
                raise ValueError(text)
            return int(text)

        return self.take(name, default, counted, f"a number from {low} to {high}")

    def log_format(self) -> str:
        formats = {one: one for one in ("text", "json")}
        return self.take("log_format", "text", formats.__getitem__, "text or json")

    def token(self, path: Path | None, state_dir: Path) -> str:
        """The token in this file; without one it is made in the state directory, for this user only."""
        made = secrets.token_urlsafe(32)
        doing = "read" if path else "write"
        try:
            if path is None:
                path = state_dir / "token"
                state_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
                is_there = path.exists()
                if not is_there or not path.stat().st_size:  # empty where the disk was full once
                    write_durably(path, f"{made}\n".encode(), replace=is_there)
            token = path.read_text().strip()
            self.has_made_token = token == made
        except (OSError, UnicodeDecodeError) as error:
            self.problems.append(f"Cannot {doing} the token in {path}: {error}")
            return ""
        if len(token) < TOKEN_CHARACTERS_MIN or not token.isascii():
            self.problems.append(
                f"The token in {path} should have {TOKEN_CHARACTERS_MIN} ASCII characters or more."
            )
        return token

    def check(self) -> None:
        """Raises WrongSettings with all that is wrong at once."""
        if self.problems:
            raise WrongSettings("\n".join(self.problems))


def path(text: str) -> Path:
    if not text:
        raise ValueError(text)
    return Path(text)


def file(text: str) -> Path:
    if not os.access(text, os.R_OK) or not Path(text).is_file():
        raise ValueError(text)
    return Path(text)


def name(text: str) -> str:
    if not 0 < len(text) <= 200 or not all(c.isascii() and (c.isalnum() or c in "._-") for c in text):
        raise ValueError(text)
    return text


def place(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or not 0 <= int(port) < 65536:
        raise ValueError(text)
    return host.removeprefix("[").removesuffix("]"), int(port)


def redis_url(text: str) -> str:
    address = redis_address.parse(text)
    if address.options:
        from telemetry.redis_clients import (
            check_options,  # to load Redis takes a fifth of an agent's start
        )

        check_options(address)
    return text


def web_url(text: str) -> str:
    parts = urlsplit(text)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(text)
    _ = parts.port
    return text.rstrip("/")
