"""A fleet as a file that people write: what may stand in it, and where it is wrong. No database.

    stamps:
      east:
        leaves:
          leaf-1:
            spine_links:
              leaf-1-up: {spine: spine-1, gbits: 400}
        nodes:
          ax-1:
            nics: {eth0: {leaf: leaf-1, wio: 16, gbits: 100}}
            memory: 1TiB
            tier2: {kind: posix, path: /mnt/kv, cap: 2TiB}
            labels: {rack: "7"}
        boxes:
          cs-1:
            memory: 44GiB
            domains:
              - {wio: 8, leaves: [leaf-1]}

Read, it is a flat mapping from what there is, such as `("node", "ax-1")`, to what is said of it; so two
fleets are compared by comparing two dictionaries.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, TypeVar

import yaml

from console.fleet.descriptions import tier2
from console.fleet.labels import NotALabel, check_labels
from console.fleet.models import DOMAINS_MAX, NAME
from console.placement.topology import NIC_WIO

STAMP, LEAF, LINK, NODE, BOX = "stamp", "leaf", "spine link", "node", "box"
KINDS: Final = (STAMP, LEAF, LINK, NODE, BOX)  # each after what it needs
THINGS_MAX: Final = 20_000
CHARACTERS_MAX: Final = 4 << 20
PROBLEMS_MAX: Final = 20
DEPTH_MAX: Final = 12
GBITS: Final = 100
_LOADER: Final[Any] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_DUMPER: Final[Any] = getattr(yaml, "CSafeDumper", yaml.SafeDumper)

Thing = tuple[str, str]
Things = dict[Thing, dict[str, Any]]
T = TypeVar("T")


class Wrong(ValueError):
    """All that is wrong with a description, each with its line and its path."""

    def __init__(self, problems: list[str]) -> None:
        self.problems = problems
        super().__init__("\n".join(problems))


def parse(text: str) -> Things:
    """What a description says. Raises Wrong."""
    if len(text) > CHARACTERS_MAX:
        raise Wrong([f"A description has at most {CHARACTERS_MAX} characters."])
    try:
        _check_shape(text)
        root = yaml.compose(text, Loader=_LOADER)
    except (yaml.YAMLError, UnicodeError) as error:
        raise Wrong([_of_yaml(error)]) from None
    reader = _Reader()
    if root is None:
        raise Wrong(["The description is empty. One of an empty fleet is `stamps: {}`."])
    reader.read(root)
    if reader.problems:
        raise Wrong(reader.problems[:PROBLEMS_MAX])
    return reader.things


def dump(things: Things) -> str:
    """The same as a file, in a stable order."""
    stamps: dict[str, Any] = {
        name: {"leaves": {}, "nodes": {}, "boxes": {}} for name in _names(things, STAMP)
    }
    leaf_of: dict[str, dict[str, Any]] = {}
    for name in _names(things, LEAF):
        leaf_of[name] = stamps[things[LEAF, name]["stamp"]]["leaves"][name] = {}
    for name in _names(things, LINK):
        said = dict(things[LINK, name])
        leaf_of[said.pop("leaf")].setdefault("spine_links", {})[name] = said
    for name in _names(things, NODE):
        said = _in_order(things[NODE, name])
        stamps[said.pop("stamp")]["nodes"][name] = said
    for name in _names(things, BOX):
        said = dict(things[BOX, name])
        stamps[said.pop("stamp")]["boxes"][name] = said
    for said in stamps.values():
        for empty in [part for part, content in said.items() if not content]:
            del said[empty]
    return str(
        yaml.dump(
            {"stamps": stamps}, Dumper=_DUMPER, sort_keys=False, default_flow_style=None, width=100
        )
    )


def _in_order(said: Mapping[str, Any]) -> dict[str, Any]:
    """What is said of a node, in one order, whoever has kept it: a file that is exported again differs
    where the fleet does."""
    found = dict(said)
    for what, order in (
        ("tier2", [*tier2.FIELDS, tier2.FRONT]),
        ("labels", sorted(said.get("labels", ()))),
    ):
        if what in found:
            found[what] = _ordered(found[what], order)
    if front := found.get("tier2", {}).get(tier2.FRONT):
        found["tier2"][tier2.FRONT] = _ordered(front, tier2.FRONT_FIELDS)
    return found


def _ordered(said: Mapping[str, Any], order: Iterable[str]) -> dict[str, Any]:
    return {name: said[name] for name in order if name in said}


def _names(things: Iterable[Thing], kind: str) -> list[str]:
    return sorted(name for one, name in things if one == kind)


def _check_shape(text: str) -> None:
    """No aliases, which can make much of little, and nothing deeper than a description is. Looked at
    before anything is built from it."""
    depth = 0
    for event in yaml.parse(text, Loader=_LOADER):
        if isinstance(event, yaml.AliasEvent):
            raise Wrong([f"{_line(event)}: aliases (`*{event.anchor}`) are not read. Write it out."])
        depth += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)
        if depth > DEPTH_MAX:
            raise Wrong([f"{_line(event)}: this is nested more deeply than any description is."])


def _of_yaml(error: Exception) -> str:
    mark = getattr(error, "problem_mark", None)
    said = getattr(error, "problem", None) or str(error).splitlines()[0]
    return f"line {mark.line + 1}: {said}." if mark else f"This is no YAML: {said}."


def _line(at: Any) -> str:
    return f"line {at.start_mark.line + 1}"


class _Reader:
    """Goes through a description once and notes everything that is wrong with it."""

    def __init__(self) -> None:
        self.things: Things = {}
        self.problems: list[str] = []
        self._lines: dict[Thing, str] = {}
        self._later: list[tuple[yaml.Node, str, str, str]] = []  # leaves that are named, and by whom

    def read(self, root: yaml.Node) -> None:
        for at, name, said in self._each(self._fields(root, "", {"stamps"}).get("stamps"), "stamps"):
            self._add((STAMP, name), said, {})
            fields = self._fields(said, at, {"leaves", "nodes", "boxes"})
            for what, read in (("leaves", self._leaf), ("nodes", self._node), ("boxes", self._box)):
                for path, inner, value in self._each(fields.get(what), f"{at}.{what}"):
                    read(path, inner, value, name)
        for node, path, leaf, stamp in self._later:
            known = self.things.get((LEAF, leaf))
            if known is None:
                self._wrong(node, path, f"there is no leaf {leaf} in this description")
            elif known["stamp"] != stamp:
                self._wrong(node, path, f"leaf {leaf} is of stamp {known['stamp']}, this of {stamp}")

    def _leaf(self, path: str, name: str, said: yaml.Node, stamp: str) -> None:
        self._add((LEAF, name), said, {"stamp": stamp})
        links = self._fields(said, path, {"spine_links"}).get("spine_links")
        for at, link, value in self._each(links, f"{path}.spine_links"):
            fields = self._fields(value, at, {"spine", "gbits"})
            found = {
                "leaf": name,
                "spine": self._take(fields, "spine", at, value, _name),
                "gbits": self._take(fields, "gbits", at, value, _count, GBITS),
            }
            self._add((LINK, link), value, found)

    def _node(self, path: str, name: str, said: yaml.Node, stamp: str) -> None:
        fields = self._fields(said, path, {"nics", "memory", "cpus", "shards_max", "tier2", "labels"})
        found: dict[str, Any] = {"stamp": stamp, "nics": {}}
        for at, nic, value in self._each(fields.get("nics"), f"{path}.nics"):
            found["nics"][nic] = self._nic(at, value, stamp)
        if not found["nics"]:
            self._wrong(said, path, "a node needs a NIC on a leaf: `nics: {eth0: {leaf: …}}`")
        converts: dict[str, Callable[[str], int | str]] = {"memory": tier2.memory, "cpus": _count}
        for what, convert in {**converts, "shards_max": _count}.items():
            if what in fields:
                found[what] = self._take(fields, what, path, said, convert)
        if "tier2" in fields:
            found["tier2"] = self._tier2(f"{path}.tier2", fields["tier2"])
        labels = {
            label: self._text(value, f"{path}.labels.{label}")
            for label, value in self._pairs(fields.get("labels"), f"{path}.labels")
        }
        try:
            check_labels(labels)
        except NotALabel as error:
            self._wrong(fields["labels"], f"{path}.labels", str(error).rstrip("."))
        if labels:
            found["labels"] = labels
        self._add((NODE, name), said, found)

    def _nic(self, path: str, said: yaml.Node, stamp: str) -> dict[str, Any]:
        fields = self._fields(said, path, {"leaf", "wio", "gbits"})
        leaf = self._take(fields, "leaf", path, said, _name)
        if "leaf" in fields and leaf:
            self._later.append((fields["leaf"], path, leaf, stamp))
        return {
            "leaf": leaf,
            "wio": self._take(fields, "wio", path, said, _count, NIC_WIO),
            "gbits": self._take(fields, "gbits", path, said, _count, GBITS),
        }

    def _tier2(self, path: str, said: yaml.Node) -> dict[str, Any]:
        before = len(self.problems)
        fields = self._fields(said, path, {*tier2.FIELDS, tier2.FRONT})
        found = self._converted(fields, path, said, tier2.FIELDS, tier2.REQUIRED)
        if (front := fields.get(tier2.FRONT)) is not None:
            at = f"{path}.{tier2.FRONT}"
            inner = self._fields(front, at, set(tier2.FRONT_FIELDS))
            found[tier2.FRONT] = self._converted(
                inner, at, front, tier2.FRONT_FIELDS, tier2.FRONT_REQUIRED
            )
        if len(self.problems) == before:
            try:
                tier2.told(found)
            except ValueError as error:
                self._wrong(said, path, str(error))
        return found

    def _converted(
        self,
        fields: Mapping[str, yaml.Node],
        path: str,
        around: yaml.Node,
        converts: Mapping[str, Callable[[str], Any]],
        required: Sequence[str],
    ) -> dict[str, Any]:
        names = [name for name in converts if name in fields or name in required]
        return {name: self._take(fields, name, path, around, converts[name]) for name in names}

    def _box(self, path: str, name: str, said: yaml.Node, stamp: str) -> None:
        fields = self._fields(said, path, {"memory", "domains"})
        domains = self._items(fields.get("domains"), f"{path}.domains")
        if not 1 <= len(domains) <= DOMAINS_MAX:
            self._wrong(said, path, f"a box has 1 to {DOMAINS_MAX} domains, this has {len(domains)}")
        found: dict[str, Any] = {"stamp": stamp, "domains": []}
        if "memory" in fields:
            found["memory"] = self._take(fields, "memory", path, said, tier2.memory)
        for index, value in enumerate(domains[:DOMAINS_MAX]):
            at = f"{path}.domains[{index}]"
            inner = self._fields(value, at, {"wio", "leaves"})
            ports = [self._text(one, at) for one in self._items(inner.get("leaves"), f"{at}.leaves")]
            if not ports or len(set(ports)) != len(ports):
                self._wrong(value, at, "a domain has a port or more, each on a leaf of its own")
            self._later += [(value, at, leaf, stamp) for leaf in ports]
            wio = self._take(inner, "wio", at, value, _count)
            found["domains"].append({"wio": wio, "leaves": sorted(ports)})
        self._add((BOX, name), said, found)

    # Reading nodes

    def _add(self, thing: Thing, at: yaml.Node, said: dict[str, Any]) -> None:
        if thing in self.things:
            self._wrong(
                at, thing[1], f"there is a {thing[0]} of that name already, {self._lines[thing]}"
            )
        elif len(self.things) >= THINGS_MAX:
            raise Wrong([f"A fleet has at most {THINGS_MAX} nodes, boxes, leaves and links together."])
        self.things[thing] = said
        self._lines[thing] = _line(at)

    def _pairs(self, node: yaml.Node | None, path: str) -> Iterator[tuple[str, yaml.Node]]:
        if node is None or (isinstance(node, yaml.ScalarNode) and node.value in ("", "~", "null")):
            return
        if not isinstance(node, yaml.MappingNode):
            self._wrong(node, path, "this should be a mapping of names to what is said of them")
            return
        seen: set[str] = set()
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.value in seen:
                self._wrong(key, path, "a name is a text, and stands here once")
                continue
            seen.add(key.value)
            yield key.value, value

    def _each(self, node: yaml.Node | None, path: str) -> Iterator[tuple[str, str, yaml.Node]]:
        """Path, name and value of each; what has no name is noted and left out."""
        for name, value in self._pairs(node, path):
            if re.fullmatch(NAME, name):
                yield f"{path}.{name}", name, value
            else:
                self._wrong(
                    value,
                    path,
                    f"{name[:80]!r} is no name: lower-case letters, digits, dots, dashes, underscores",
                )

    def _fields(self, node: yaml.Node | None, path: str, known: set[str]) -> dict[str, yaml.Node]:
        found = {}
        for name, value in self._pairs(node, path):
            if name in known:
                found[name] = value
            else:
                allowed = ", ".join(sorted(known))
                self._wrong(value, path, f"{name[:80]!r} is not known here; known are {allowed}")
        return found

    def _items(self, node: yaml.Node | None, path: str) -> list[yaml.Node]:
        if isinstance(node, yaml.SequenceNode):
            return list(node.value)
        if node is not None:
            self._wrong(node, path, "this should be a list")
        return []

    def _text(self, node: yaml.Node, path: str) -> str:
        if isinstance(node, yaml.ScalarNode):
            return str(node.value)
        self._wrong(node, path, "this should be a text")
        return ""

    def _take(
        self,
        fields: Mapping[str, yaml.Node],
        name: str,
        path: str,
        around: yaml.Node,
        convert: Callable[[str], T],
        default: T | None = None,
    ) -> T | None:
        """A value; None where it is missing or wrong, which is noted then."""
        if name not in fields:
            if default is None:
                self._wrong(around, path, f"`{name}` is missing")
            return default
        try:
            return convert(self._text(fields[name], f"{path}.{name}"))
        except ValueError as error:
            self._wrong(fields[name], f"{path}.{name}", str(error).removesuffix("."))
            return default

    def _wrong(self, at: yaml.Node, path: str, what: str) -> None:
        self.problems.append(f"{_line(at)}, {path or 'at the top'}: {what}.")


def _name(text: str) -> str:
    if not re.fullmatch(NAME, text):
        raise ValueError(f"{text[:80]!r} is no name")
    return text


def _count(text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,6}", text) or not 0 < int(text) <= 32_000:
        raise ValueError(f"{text[:80]!r} should be a whole number from 1 to 32000")
    return int(text)
