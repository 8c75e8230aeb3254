"""Descriptions of fleets."""

from __future__ import annotations

from console.fleet.descriptions.document import Things


def many(nodes: int) -> Things:
    """One stamp of 20 leaves and so many nodes."""
    things: Things = {("stamp", "east"): {}}
    for leaf in range(20):
        things["leaf", f"leaf-{leaf}"] = {"stamp": "east"}
    for node in range(nodes):
        nic = {"leaf": f"leaf-{node % 20}", "wio": 16, "gbits": 100}
        things["node", f"ax-{node}"] = {"stamp": "east", "nics": {"eth0": nic}}
    return things
