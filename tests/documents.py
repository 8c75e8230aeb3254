"""A document as its reader goes through it: every command of its consoles in one shell.

A command is repeated until it prints what the document shows, as documents tell people to do."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

from console.environment import PROJECT
from tests.live import wait_until

BLOCK: Final = re.compile(r"^```console\n(.*?)^```", re.MULTILINE | re.DOTALL)
SECONDS: Final = 180.0  # for a command, with all its repetitions
END: Final = "--- the command has ended with "


@dataclass(frozen=True)
class Step:
    """A command, and the lines that it prints."""

    command: str
    shown: tuple[str, ...]

    @property
    def pattern(self) -> re.Pattern[str]:
        """What is shown, with other numbers. No number may become none, and none no number: a miss is
        no hit. `…` is anything, and columns may be of any width."""
        return re.compile(".*".join(map(_pattern, self.shown)), re.DOTALL)


def _pattern(line: str) -> str:
    found = re.escape(line).replace("…", ".*")
    found = re.sub(r"(?:\\ )+", r"\\s+", found)
    return re.sub(r"\b\d+\b", lambda number: "0" if number[0] == "0" else r"[1-9]\d*", found)


def steps(text: str) -> Iterator[Step]:
    """Of all consoles in a document, in its order."""
    for block in BLOCK.findall(text):
        lines = iter(block.splitlines())
        command, shown = "", list[str]()
        for line in lines:
            if not line.startswith("$ "):
                shown.append(line)
                continue
            if command:
                yield Step(command, tuple(shown))
            command, shown = line.removeprefix("$ "), []
            ending = re.search(r"<<'(\w+)'$", command)
            while command.endswith("\\") or (ending and command.splitlines()[-1] != ending[1]):
                command += "\n" + next(lines)
        yield Step(command, tuple(shown))


class Shell:
    """One bash, in which variables and functions of earlier commands stay. `instead`: what stands in the
    document, and what it is here; more may be put in meanwhile. `folder`: where it begins."""

    def __init__(
        self, instead: Mapping[str, str], environment: Mapping[str, str], folder: Path = PROJECT
    ) -> None:
        self._instead = instead
        self._process = subprocess.Popen(
            ["/bin/bash", "--norc"],
            cwd=folder,
            env=dict(environment),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()

    def run(self, command: str) -> tuple[int, str]:
        """Its exit code, and what it prints."""
        command = self._here(command)
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(f"{command}\ncode=$?; echo; echo '{END}'$code\n")
        self._process.stdin.flush()
        said = ""
        for line in self._process.stdout:
            if line.startswith(END):
                return int(line.removeprefix(END)), said.strip()
            said += line
        raise AssertionError(f"the shell has ended: {said}")

    def _here(self, text: str) -> str:
        for known, here in self._instead.items():
            text = text.replace(known, here)
        return text

    def follow(self, step: Step) -> None:
        """Repeat a command until it succeeds and prints what is shown."""
        pattern = Step(step.command, tuple(map(self._here, step.shown))).pattern
        printed: list[tuple[int, str]] = []

        def works() -> bool:
            printed.append(self.run(step.command))
            code, said = printed[-1]
            return code == 0 and bool(pattern.search(said))

        try:
            wait_until(f"it prints {step.shown}", works, SECONDS)
        except AssertionError as error:
            whole = self.run(step.command.partition(" | ")[0])  # what a filter behind it does not show
            raise AssertionError(
                f"{step.command}: {error}; it printed {printed[-1]}, and unfiltered {whole}"
            ) from None
