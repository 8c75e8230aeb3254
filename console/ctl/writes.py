"""The commands that change something: apply, diff, delete, the actions of the table."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeVar

from console.ctl import waits
from console.ctl.arguments import FIELDS
from console.ctl.catalogue import Reference, fetch, references
from console.ctl.cells import spoken
from console.ctl.changes import Change, body_of, make, operation_of, planned, send
from console.ctl.client import Answer, Client
from console.ctl.failures import Exit, Failed, Refused, TimedOut, Unavailable, Usage
from console.ctl.manifests import Fields, Manifest, difference, load
from console.ctl.output import Screen
from console.ctl.resources import with_action

T = TypeVar("T")
ACCEPTED: Final = 202  # and no operation: it goes on by itself
# What is done to a resource, when it has been done.
_DONE: Final = {
    "cancel": "cancelled",
    "drain": "drained",
    "retry": "retried",
    "scale": "scaled",
    "rollout undo": "rolled back",
    "rollout pause": "paused",
    "rollout resume": "resumed",
    "restore-rails": "rails restored",
    "undo": "undone",
}


def apply(client: Client, given: argparse.Namespace, screen: Screen) -> None:
    """Each manifest in its turn; those after one that fails are applied all the same."""
    doing = _Doing(client, given, screen)

    def one(manifest: Manifest) -> None:
        change = planned(client, manifest, given.reason)
        if change.body is None:
            doing.say(manifest.reference, Answer(200, None), change.verb)
            return
        if ended := _ended(client, change):
            sys.stderr.write(spoken(_warning(change, ended), sys.stderr.encoding))
            if not given.yes and not given.dry_run:
                _confirm("Apply it?", "Nothing was changed.")
        answer = make(client, change, dry_run=given.dry_run)
        is_same = bool(change.etag) and answer.etag == change.etag  # 10m is 600 to the console as well
        verb = "unchanged" if is_same else change.verb
        doing.follow(manifest.reference, answer, verb)

    doing.each(load(given.filename), one)


def diff(client: Client, given: argparse.Namespace, screen: Screen) -> int:
    """Exits with 1 where anything differs. Says which nodes that are alive it would remove."""
    differs = False
    for manifest in load(given.filename):
        change = planned(client, manifest, given.reason)
        _say_lines(screen, str(change))
        differs = differs or change.body is not None
        try:
            if change.body is not None and (ended := _ended(client, change)):
                sys.stderr.write(spoken(_warning(change, ended), sys.stderr.encoding))
        except Refused as error:  # who may only read gets no dry run
            sys.stderr.write(
                spoken(
                    f"Whether it removes nodes that are alive is not known: {error}\n",
                    sys.stderr.encoding,
                )
            )
    return Exit.FAILED if differs else Exit.OK


def _ended(client: Client, change: Change) -> list[str]:
    """Nodes that are alive and would be removed by it."""
    if not change.call.ends:
        return []
    answer = make(client, change, dry_run=True)
    return [str(name) for name in answer.body[change.call.ends]]


def _warning(change: Change, ended: list[str]) -> str:
    return f"{change.manifest.reference} removes nodes that are alive: {', '.join(ended)}.\n"


def _difference(client: Client, reference: Reference, answer: Answer) -> str:
    """What a dry run would change of a thing that it answered with, as it would be."""
    inner, body = reference.resource.inner, answer.body
    if not inner or not isinstance(body, dict) or inner not in body:
        return ""
    return difference(reference, fetch(client, reference).item[inner], body[inner])


def _say_lines(screen: Screen, text: str) -> None:
    for line in text.splitlines():
        screen.say(line, _style_of(line))


def _style_of(line: str) -> str:
    if line.startswith(("---", "+++")):
        return "bold"
    return {"+": "green", "-": "red", "@": "cyan"}.get(line[:1], "")


def delete(client: Client, given: argparse.Namespace, screen: Screen) -> None:
    found = references(given.what) if given.what else []
    found += [manifest.reference for manifest in (load(given.filename) if given.filename else [])]
    if not found:
        raise Usage("Say what to delete: KIND NAME, or -f FILE.")
    for reference in found:
        if reference.resource.delete is None:
            raise Usage(f"A {reference.resource.name} can't be deleted.")
    if not given.yes and not given.dry_run:
        _confirm("Delete " + ", ".join(map(str, found)) + "?", "Nothing was deleted.")
    doing = _Doing(client, given, screen)

    def one(reference: Reference) -> None:
        call = reference.resource.delete
        query = {"end_jobs": True} if given.end_jobs else {}
        assert call is not None  # noqa: S101 - looked at above
        answer = send(client, reference, call, {}, dry_run=given.dry_run, query=query)
        doing.follow(reference, answer, "deleted")

    doing.each(found[::-1], one)  # what is inside something else was named after it


def act(client: Client, given: argparse.Namespace, screen: Screen) -> None:
    """An action of the table: drain, scale, acknowledge, …"""
    verb: str = given.does
    allowed = list(with_action(verb))
    doing = _Doing(client, given, screen)
    fields = {name: value for name in FIELDS if (value := getattr(given, name, None)) is not None}

    def one(reference: Reference) -> None:
        call = reference.resource.actions[verb]
        body: Fields = body_of(call, fields, given.reason)
        answer = send(client, reference, call, body, dry_run=getattr(given, "dry_run", False))
        done = _DONE.get(verb, f"{verb}{'' if verb.endswith('e') else 'e'}d")
        doing.follow(reference, answer, done)
        if getattr(given, "dry_run", False) and given.output not in ("json", "yaml", "name"):
            _say_lines(screen, _difference(client, reference, answer))

    found = references(given.what, default=allowed[0].name)
    for reference in found:
        if verb not in reference.resource.actions:
            kinds = " or ".join(resource.name for resource in allowed)
            raise Usage(f"That is for a {kinds}, and {reference} is a {reference.resource.name}.")
        if missing := [name for name in reference.resource.actions[verb].needed if name not in fields]:
            raise Usage(f"For a {reference.resource.name}, say --{missing[0]}.")
    doing.each(found, one)


class _Doing:
    """What a command does to each of several things, and says of it. Where a document is asked for, that
    has all answers and is written at the end."""

    def __init__(self, client: Client, given: argparse.Namespace, screen: Screen) -> None:
        self._client, self._given, self._screen = client, given, screen
        self._is_dry = getattr(given, "dry_run", False)
        self._is_document = given.output in ("json", "yaml")
        self._answers: list[Any] = []

    def each(self, things: Sequence[T], one: Callable[[T], Any]) -> None:
        """Do one after the other; raises the first failure when all have been tried, and says the others
        before. It is no Usage where one succeeded, since that says that nothing was changed."""
        failures: list[Failed] = []
        try:
            for thing in things:
                try:
                    one(thing)
                except Failed as error:
                    if failures:
                        sys.stderr.write(spoken(f"tidegatectl: {error}\n", sys.stderr.encoding))
                    failures.append(error)
        finally:
            self._end(is_list=len(things) > 1)
        if not failures:
            return
        if len(failures) < len(things) and isinstance(failures[0], Usage):
            raise Failed(str(failures[0])) from failures[0]
        raise failures[0]

    def _end(self, *, is_list: bool) -> None:
        if self._is_document and (self._answers or is_list):
            self._screen.document(self._given.output, self._answers, is_list=is_list)

    def follow(self, reference: Reference, answer: Answer, done: str) -> None:
        """Say what was done, after the operation that was started, if anybody waits for it."""
        given, operation = self._given, operation_of(answer)
        if operation is not None and reference.resource.name != "operation":
            again = f"tidegatectl wait operation/{operation['id']} --for done"
            if given.no_wait:
                self.say(reference, answer, f"started: {again}")
                return
            try:
                waits.follow(self._client, operation, given.timeout)
            except (KeyboardInterrupt, Unavailable, TimedOut):
                sys.stderr.write(f"\nIt continues: {again}\n")
                raise
        elif answer.status == ACCEPTED and reference.resource.delete and not given.no_wait:
            waits.until(self._client, reference, waits.DELETED, given.timeout)
        self.say(reference, answer, done)

    def say(self, reference: Reference, answer: Answer, done: str) -> None:
        if self._is_document:
            if answer.body is not None:
                self._answers.append(answer.body)
            return
        if self._given.output == "name":
            self._screen.say(str(reference))
            return
        self._screen.say(f"{reference} {done}{' (dry run)' if self._is_dry else ''}")
        if self._is_dry and isinstance(answer.body, dict):
            for name in ("summary", "sentence", "warning"):
                if answer.body.get(name):
                    self._screen.say(f"  {answer.body[name]}")
            for line in _streams_that_leave(answer.body):
                self._screen.say(f"  {line}")


def _streams_that_leave(body: Mapping[str, Any]) -> list[str]:
    """Where streams would go by a dry run of a drain or of restored rails, and what would wait."""
    moves = [
        f"{move['stream']} to {move['target']} ({move.get('path') or move['path_after']})"
        for move in body.get("moves", ())
    ]
    return [*moves, *body.get("staying", ()), *filter(None, [body.get("waits_for")])]


def _confirm(question: str, otherwise: str) -> None:
    """Raises Failed with `otherwise` if a person says no, and Usage where there is no person."""
    if not sys.stdin.isatty():
        raise Usage("Nobody is there to be asked. Say --yes.")
    sys.stderr.write(f"{question} [y/N] ")
    sys.stderr.flush()
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise Failed(otherwise)
