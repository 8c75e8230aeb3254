"""The commands that only look: get, describe, explain, wait, whoami."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any, Final

from console.ctl import waits
from console.ctl.arguments import filters, option_of
from console.ctl.catalogue import Reference, fetch, listed, references, referred
from console.ctl.client import Client, Item, at
from console.ctl.explanations import in_words
from console.ctl.failures import NotFound, Refused, Usage
from console.ctl.output import Screen, fitting, row_of, widths_of
from console.ctl.resources import Resource, named
from telemetry.metrics import words_of

RELATED_MAX: Final = 10
RELATED: Final = ("operation", "alert", "event")  # by what they say of a topic
ORGS_ASKED_MAX: Final = 50


def get(client: Client, given: argparse.Namespace, screen: Screen) -> None:
    """Lists, or items by their names."""
    first, *names = given.what
    if names or "/" in first:
        if given.watch:
            _watch(client, given, screen, references(given.what))
            return
        found = references(given.what)
        items = [(reference.resource, fetch(client, reference).item) for reference in found]
        _print(screen, given, items, is_list=len(items) > 1)
        return
    resources = [named(word) for word in first.split(",")]
    if given.watch:
        if len(resources) > 1:
            raise Usage("Watch one kind at a time.")
        _watch(client, given, screen, resources[0])
        return
    items = [(one, item) for one in resources for item in _asked(client, given, one)]
    if not items and given.output in (None, "wide"):
        screen.say("There are none.", "dim")
        return
    _print(screen, given, items, is_list=True)


def _asked(client: Client, given: argparse.Namespace, resource: Resource) -> Iterator[Item]:
    """The items of a kind that the filters ask for. Raises Usage for a filter that the kind has not."""
    query = {name: value for name in filters() if (value := getattr(given, name)) is not None}
    for name in query:
        if name not in resource.filters and name != resource.parent:
            raise Usage(f"{resource.plural} are not found by {option_of(name)}.")
    is_parent = resource.parent in query and resource.parent not in resource.filters
    parent = query.pop(resource.parent, "") if is_parent else ""
    most = given.limit
    for count, item in enumerate(listed(client, resource, query, parent=parent, most=most)):
        if most is not None and count >= most:
            return
        yield item


def name_of(resource: Resource, item: Item) -> str:
    return f"{resource.name}/{resource.name_of(item, str(item.get(resource.parent, '')))}"


def _print(
    screen: Screen, given: argparse.Namespace, items: list[tuple[Resource, Item]], *, is_list: bool
) -> None:
    if given.output in ("json", "yaml"):
        screen.document(given.output, [item for _, item in items], is_list=is_list)
    elif given.output == "name":
        for resource, item in items:
            screen.say(name_of(resource, item))
    else:
        kinds = list(dict.fromkeys(resource.name for resource, _ in items))
        for place, kind in enumerate(kinds):
            if place:
                screen.say("")
            own = [item for resource, item in items if resource.name == kind]
            screen.listing(
                named(kind), own, wide=given.output == "wide", has_headings=not given.no_headers
            )


def _watch(
    client: Client, given: argparse.Namespace, screen: Screen, what: Resource | list[Reference]
) -> None:
    """First all rows, then those that have changed, until it is interrupted. What is deleted is said on
    standard error where a program reads the rest."""
    resource = what if isinstance(what, Resource) else what[0].resource
    columns = resource.shown(wide=given.output == "wide")
    seen: dict[str, Item] = {}
    widths: list[int] = []
    states = [place for place, column in enumerate(columns) if column.form == "state"]
    notes = Screen(sys.stderr) if given.output in ("json", "yaml", "name") else screen
    documents = 0
    while True:
        if isinstance(what, Resource):
            items = list(_asked(client, given, resource))
        else:
            items = [fetch(client, reference).item for reference in what]
        now = {name_of(resource, item): item for item in items}
        changed = [item for name, item in now.items() if item != seen.get(name)]
        gone = [name for name in seen if name not in now]
        if given.output in ("json", "yaml"):
            for item in changed:
                if documents and given.output == "yaml":
                    screen.say("---")
                screen.document(given.output, [item], is_list=False)
                documents += 1
        elif given.output == "name":
            for item in changed:
                screen.say(name_of(resource, item))
        else:
            headings = [] if seen or widths or given.no_headers else [[one.heading for one in columns]]
            rows = [row_of(columns, item, time.time()) for item in changed]
            if headings or rows:
                widths = [
                    max(pair)
                    for pair in zip(
                        widths_of([*headings, *rows]), widths or [0] * len(columns), strict=True
                    )
                ]
                fit = fitting(widths, screen.width)
                screen.rows(headings, fit, style="bold")
                screen.rows(rows, fit, states)
        for name in gone:
            notes.say(f"{name} deleted")
        seen = now
        time.sleep(given.interval)


def describe(client: Client, given: argparse.Namespace, screen: Screen) -> None:
    """All fields, then what goes on with it: operations, alerts, events."""
    for place, reference in enumerate(references(given.what)):
        if place:
            screen.say("")
        item = fetch(client, reference).item
        screen.described(item)
        if reference.resource.topic:
            _related(client, screen, reference.resource.topic.format(reference.name))


def _related(client: Client, screen: Screen, topic: str) -> None:
    for kind in RELATED:
        resource = named(kind)
        query = {"target": topic} if kind == "operation" else {"topic": topic}
        if kind == "event":
            query["order"] = "newest"
        try:
            items = list(listed(client, resource, query, most=RELATED_MAX))
        except Refused as error:
            if error.status not in (403, 404):
                raise
            continue  # members of an org see less of the fleet
        if items:
            screen.say(f"\n{resource.plural.capitalize()}:", "bold")
            screen.listing(resource, items)


def explain(client: Client, given: argparse.Namespace, screen: Screen) -> None:
    """Why a request was a hit or a miss, and why it went to its replica."""
    found = _explained(client, given)
    if given.output in ("json", "yaml"):
        screen.document(given.output, [found], is_list=False)
        return
    route, answers = found["route"], found["answers"]
    for one in found["silent_brains"]:
        screen.say(f"Brain {one['brain'] or 'unknown'} did not answer: {one['reason']}", "yellow")
    for one in found["unreachable"]:
        screen.say(f"Driver {one['driver'] or 'unknown'} did not answer: {one['reason']}", "yellow")
    if not route and not answers:
        raise NotFound(
            f"No brain and no driver remembers request {given.request}. The id of a request is the "
            "header `x-request-id` of its answer. The answer of one that was rejected says why itself."
        )
    if route:
        screen.say(f"Route: {route['why'] or 'it went to ' + route['chosen']}", "bold")
        told = {name: value for name, value in route.items() if name != "why" and value != {}}
        screen.described(in_words(told))
    for answer in answers:
        screen.say("")
        screen.say(f"Cache: {_hits(answer)}", "bold")
        told = {name: value for name, value in answer.items() if value not in (None, {}, [])}
        screen.described(in_words(told))


def _hits(answer: Mapping[str, Any]) -> str:
    result = answer["result"]
    if not result:
        return f"driver {answer['driver']}"
    missed = ", ".join(
        f"{tokens} {words_of(reason)}" for reason, tokens in result["missed_tokens"].items()
    )
    text = f"{result['hit_tokens']} of {result['asked_tokens']} tokens were hits"
    return f"{text}; missed: {missed}" if missed else text


def _explained(client: Client, given: argparse.Namespace) -> Item:
    orgs = (
        [given.org]
        if given.org
        else [str(org["slug"]) for org in client.items("/orgs", {}, ORGS_ASKED_MAX + 1)]
    )
    if not orgs:
        raise Usage("You see no org. Say --org.")
    for org in orgs[:ORGS_ASKED_MAX]:
        found: Item = client.ask(
            "POST", at("/orgs/{slug}/explain", org), body={"request": given.request}
        ).body
        if found["route"] or found["answers"]:
            return found
    if len(orgs) > ORGS_ASKED_MAX:
        raise Usage(
            f"Nobody of the first {ORGS_ASKED_MAX} orgs remembers it, and you see more. Say --org."
        )
    return found


def wait(client: Client, given: argparse.Namespace, screen: Screen) -> None:
    for reference in references(given.what):
        if reference.resource.name == "operation" and given.condition in ("done", "succeeded"):
            waits.follow(client, fetch(client, reference).item, given.timeout)
        else:
            waits.until(client, reference, given.condition, given.timeout)
        screen.say(
            f"{reference} is {given.condition}"
            if given.condition != waits.DELETED
            else f"{reference} deleted"
        )


def whoami(client: Client, _: argparse.Namespace, screen: Screen) -> None:
    screen.described({"console": client.address, **client.as_kind(client.get("/me"), Item)})


def status(client: Client, given: argparse.Namespace, screen: Screen) -> None:
    """Of a rollout: followed to its end, or as it is now."""
    reference = referred(named("workload"), given.name)
    if given.no_wait:
        item = fetch(client, reference).item
        screen.described(item["rollout"] or {"revision": item["revision"], "ready": item["ready"]})
        return
    item = waits.rollout(client, reference, given.timeout)
    screen.say(f"{reference} runs revision {item['revision']}")


def history(client: Client, given: argparse.Namespace, screen: Screen) -> None:
    resource = named("revision")
    items = [(resource, item) for item in listed(client, resource, parent=given.name)]
    given.no_headers = False
    _print(screen, given, items, is_list=True)
