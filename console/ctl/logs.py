"""`tidegatectl logs`: what instances write."""

from __future__ import annotations

import argparse
from typing import Final

from console.ctl.catalogue import Reference, listed, references
from console.ctl.cells import printable
from console.ctl.client import Client, at
from console.ctl.failures import NotFound, Unavailable, Usage
from console.ctl.output import Screen
from console.ctl.resources import named

MARK: Final = (
    "--- tidegate: "  # begins the last line of a followed log that ends before its instance does
)
PATH: Final = "/workloads/{name}/logs"


def logs(client: Client, given: argparse.Namespace, screen: Screen) -> None:
    """Of instances, or of all that run of a workload."""
    instances = [one for said in references(given.what, "workload") for one in _instances(client, said)]
    if given.follow and len(instances) > 1:
        names = " ".join(f"instance/{workload}/{name}" for workload, name in instances)
        raise Usage(f"Follow one instance at a time. These are running: {names}")
    for place, (workload, name) in enumerate(instances):
        if len(instances) > 1:
            screen.say(f"{'' if not place else chr(10)}==> {name} <==", "bold")
        query = {"instance": name, "tail": given.tail, "follow": given.follow or None}
        end = ""
        for line in client.lines(at(PATH, workload), query, is_endless=given.follow):
            if end:
                screen.say(end)
            said = printable(line)
            end = said if given.follow and said.startswith(MARK) else ""
            if not end:
                screen.say(said)
        if end:
            raise Unavailable(end.removeprefix(MARK))


def _instances(client: Client, reference: Reference) -> list[tuple[str, str]]:
    """Workload and name of each."""
    resource, parent, name = reference
    if resource.name == "instance":
        return [(parent, name)]
    if resource.name != "workload":
        raise Usage(f"A {resource.name} has no log here. Name a workload, or instance/WORKLOAD/NAME.")
    found = [one["name"] for one in listed(client, named("instance"), {"ended": False}, parent=name)]
    if not found:
        raise NotFound(f"{reference} has no running instance.")
    return [(name, one) for one in reversed(found)]
