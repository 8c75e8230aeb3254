"""docs/tutorial.md as its reader goes through it: every command in one shell, on a stack that is up.

A command is repeated until it prints what the document shows, as that tells people to do."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final, Self

from console.environment import PROJECT
from tests.live import wait_until
from tests.stack.whole import Whole

TEXT: Final = (PROJECT / "docs" / "tutorial.md").read_text()
BLOCKS: Final = re.findall(r"^```console\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
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


def steps() -> Iterator[Step]:
    """In the document's order."""
    for block in BLOCKS:
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
    document, and what it is here."""

    def __init__(self, instead: Mapping[str, str], environment: Mapping[str, str]) -> None:
        self._instead = instead
        self._process = subprocess.Popen(
            ["/bin/bash", "--norc"],
            cwd=PROJECT,
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
        for known, here in self._instead.items():
            command = command.replace(known, here)
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

    def follow(self, step: Step) -> None:
        """Repeat a command until it succeeds and prints what is shown."""
        printed: list[tuple[int, str]] = []

        def works() -> bool:
            printed.append(self.run(step.command))
            code, said = printed[-1]
            return code == 0 and bool(step.pattern.search(said))

        try:
            wait_until(f"it prints {step.shown}", works, SECONDS)
        except AssertionError as error:
            raise AssertionError(f"{step.command}: {error}; it printed {printed[-1]}") from None


def follow(stack: Whole, token: str) -> None:
    """Go through it on this stack. `token`: what its reader gets on the page Tokens."""
    instead = {
        "http://127.0.0.1:8400": stack.address,
        "http://127.0.0.1:8440": stack.brain_address,
        "tgw_…": token,
        ".tidegate/": f"{stack.state}/",
        ".venv/bin/python": sys.executable,
    }
    first, *others = steps()
    assert first.command == "make up", "which is what its reader has done"
    with Shell(instead, stack.environment) as shell:
        for step in others:
            shell.follow(step)
