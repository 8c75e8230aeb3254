"""Upgrading many nodes, a few at a time: each is drained, gets its new software, and returns.

What is done is seen in what nodes report and in operations, so there is nothing to keep between two
runs: one that is started again follows what runs and goes on with the rest. The console drains a node
and waits for the new agent; who replaces the software is a command of the operator's (`--run`), or
whatever looks after the machines.
"""

from __future__ import annotations

import argparse
import contextlib
import shlex
import subprocess
import sys
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Final

from console.ctl.cells import percent, spoken
from console.ctl.client import Client, Item, at
from console.ctl.failures import Failed, Refused, TimedOut
from console.ctl.output import Screen
from console.ctl.waits import AWAY, Deadline
from telemetry.units import duration

KIND: Final = "node.upgrade"
REAP_SECONDS: Final = 5.0
PLACE: Final = "{node}"
LOOK_SECONDS: Final = 1.0
LOST: Final = "lost"
AWAITS_SOFTWARE: Final = "maintenance"  # the state of a node that is drained, until its agent is new
STUCK: Final = "stuck"
STANDARD_ERROR: Final = 2


@dataclass(frozen=True, slots=True)
class Node:
    name: str
    version: str
    state: str


@dataclass(frozen=True, slots=True)
class Fleet:
    """As the console says it is."""

    nodes: Mapping[str, Node]
    running: Mapping[str, Item]  # operations, by their node
    pages: tuple[str, ...]  # alerts that page somebody, and that nobody has acknowledged


def due(fleet: Fleet, version: str, at_once: int, failed: Collection[str], *, rests: bool) -> list[str]:
    """The nodes to begin with now: the first by name of those that are left, as there is room.

    None while an alert pages somebody, after a failure, or while the last ones are observed (`rests`).
    """
    if fleet.pages or failed or rests:
        return []
    room = at_once - len(fleet.running)
    return left(fleet, version, failed)[: max(0, room)]


def left(fleet: Fleet, version: str, failed: Collection[str]) -> list[str]:
    """The nodes that have to be begun with, by name. Not those that are lost: nothing answers there."""
    return [
        name
        for name, node in sorted(fleet.nodes.items())
        if node.version != version
        and node.state != LOST
        and name not in fleet.running
        and name not in failed
    ]


def elsewhere(fleet: Fleet, version: str) -> dict[str, str]:
    """Nodes whose running upgrade waits for another version, and what to do. None of those that wait for
    any new version."""
    return {
        name: f"its upgrade to {other} is running. "
        f"Cancel it first: `tidegatectl cancel {operation['id']}`."
        for name, operation in sorted(fleet.running.items())
        if (other := operation["parameters"]["version"]) not in ("", version)
    }


@dataclass
class Upgrade:
    """One run of the command."""

    client: Client
    given: argparse.Namespace
    screen: Screen
    failed: dict[str, str] = field(default_factory=dict)  # node → why
    _followed: dict[str, str] = field(default_factory=dict)  # node → its operation
    _commands: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    _said: dict[str, str] = field(default_factory=dict)
    _rests_until: float = 0.0

    def run(self) -> None:
        """Until all are upgraded. Raises Failed and TimedOut."""
        ends = time.monotonic() + self.given.timeout
        deadline = Deadline(self.given.timeout)
        self.look()  # a console that does not answer now is not waited for
        while True:
            fleet = deadline.patiently(self._step)
            waiting = left(fleet, self.given.version, self.failed)
            self._say("", self._why_it_waits(fleet, waiting))
            if not self._followed and (self.failed or not waiting):
                self._reap()
                break
            if time.monotonic() > ends:
                raise TimedOut(
                    f"Not all nodes were upgraded within {duration(self.given.timeout)}. {AGAIN}"
                )
            time.sleep(LOOK_SECONDS)
        self.check()
        lost = sorted(name for name, node in fleet.nodes.items() if node.version != self.given.version)
        self.screen.say(f"{len(fleet.nodes) - len(lost)} nodes run {self.given.version}.")
        if lost:
            self.screen.say(f"Left out, because they are lost: {', '.join(lost)}.")

    def _reap(self) -> None:
        """A node may report its new version before the command that installed it has ended."""
        until = time.monotonic() + REAP_SECONDS
        for command in self._commands.values():
            with contextlib.suppress(subprocess.TimeoutExpired):  # it goes on by itself
                command.wait(max(0.0, until - time.monotonic()))

    def _step(self) -> Fleet:
        """Follow what runs and begin what is due. All of it can be done again, as it goes by what the
        console says."""
        fleet = self.look()
        self._settle(fleet)
        self._install(fleet)
        rests = time.monotonic() < self._rests_until
        for name in due(fleet, self.given.version, self.given.at_once, self.failed, rests=rests):
            self._begin(name)
        return fleet

    def check(self) -> None:
        """Raises Failed where any has failed."""
        if self.failed:
            raise Failed(f"{'; '.join(f'{name}: {why}' for name, why in self.failed.items())} {AGAIN}")

    def look(self) -> Fleet:
        chosen = {name: getattr(self.given, name) for name in ("stamp", "label")}
        nodes = {
            item["name"]: Node(item["name"], item["software_version"], item["state"])
            for item in self.client.items("/nodes", chosen)
            if item["joined_at"]
        }
        operations = self.client.items("/operations", {"kind": KIND, "done": False})
        running = {str(item["target"]).partition(":")[2]: item for item in operations}
        firing = {"state": "firing", "severity": "page", "suppressed": False}
        pages = [
            f"{item['rule']} on {item['subject']}"
            for item in self.client.items("/alerts", firing)
            if not item["acknowledged_by"]
        ]
        return Fleet(
            nodes,
            {name: item for name, item in running.items() if name in nodes},
            tuple(sorted(pages)),
        )

    def _begin(self, name: str) -> None:
        body = {
            "version": self.given.version,
            "ignore_redundancy": self.given.ignore_redundancy,
            "reason": self.given.reason,
        }
        try:
            answer = self.client.ask("POST", at("/nodes/{}/upgrade", name), body=body)
        except Refused as error:
            if error.code in AWAY:
                raise
            self.failed[name] = str(error)
            return
        self._followed[name] = str(answer.body["id"])
        self._say(name, "begun")

    def _settle(self, fleet: Fleet) -> None:
        """Say how far those are that run, also of an earlier run, and note how the others have ended."""
        self.failed = elsewhere(fleet, self.given.version) | self.failed
        for name, operation in fleet.running.items():
            if operation["state"] == STUCK:
                self.failed.setdefault(name, f"stuck: {operation['progress']['message']}")
                self._followed.pop(name, None)
                continue
            if name not in self.failed:
                self._followed[name] = str(operation["id"])
            progress = operation["progress"]
            self._say(name, f"{percent(progress['percent'])}: {progress['message']}")
        for name in set(self._followed) - set(fleet.running):
            operation = self.client.get(at("/operations/{}", self._followed[name]))
            if not operation["done"]:
                continue  # it was begun after we looked
            del self._followed[name]
            if operation["state"] != "succeeded":
                error = operation["error"] or {}
                self.failed[name] = f"{operation['state']}: {error.get('detail', '')}"
            else:
                self._rests_until = time.monotonic() + self.given.observe
            self._say(name, self.failed.get(name, "upgraded"))

    def _install(self, fleet: Fleet) -> None:
        """Run the operator's command for each drained node, once in this run."""
        for name, operation in fleet.running.items():
            identity = str(operation["id"])
            if fleet.nodes[name].state != AWAITS_SOFTWARE or not self.given.run:
                continue
            if identity not in self._commands:
                if name in self.failed:
                    continue
                words = [word.replace(PLACE, name) for word in shlex.split(self.given.run)]
                self._say(name, f"runs {shlex.join(words)}")
                self._commands[identity] = self._started(words)
            elif (code := self._commands[identity].poll()) and name not in self.failed:
                self.failed[name] = f"`{self.given.run}` ended with {code}; the node stays drained."
                self._followed.pop(name, None)

    def _started(self, words: list[str]) -> subprocess.Popen[bytes]:
        """What it prints goes to standard error, and Ctrl-C is not for it. Raises Failed without such a
        program."""
        try:
            return subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=STANDARD_ERROR, start_new_session=True
            )
        except OSError as error:
            raise Failed(f"{words[0]} can't be run: {error.strerror}. {AGAIN}") from error

    def _why_it_waits(self, fleet: Fleet, waiting: list[str]) -> str:
        if self.failed and self._followed:
            return f"No other node is begun with. Still running: {', '.join(sorted(self._followed))}."
        if fleet.pages and waiting:
            return f"Paused: {'; '.join(fleet.pages)}. It goes on when that is resolved or acknowledged."
        return ""

    def _say(self, name: str, text: str) -> None:
        """What has changed, once."""
        if self._said.get(name, "") == text:
            return
        self._said[name] = text
        if text:
            line = f"{name}: {text}" if name else text
            sys.stderr.write(spoken(line, sys.stderr.encoding) + "\n")
            sys.stderr.flush()


AGAIN: Final = "Run the command again to go on."


def upgrade_fleet(client: Client, given: argparse.Namespace, screen: Screen) -> None:
    """Upgrade all nodes that run another version."""
    upgrade = Upgrade(client, given, screen)
    if given.dry_run:
        fleet = upgrade.look()
        upgrade.failed = elsewhere(fleet, given.version)
        upgrade.check()
        for name in left(fleet, given.version, ()):
            screen.say(f"node/{name} upgraded (dry run)")
        return
    try:
        upgrade.run()
    except KeyboardInterrupt:
        sys.stderr.write(f"\nNodes that were begun with go on. {AGAIN}\n")
        raise
    except Failed as error:
        if error.code not in AWAY or AGAIN in str(error):
            raise
        raise Failed(f"{error} {AGAIN}", error.code) from error
