"""`make audit-offline OSV=all.zip`: the locks against a local copy of the advisories. No network.

The copy is the export of the OSV database for PyPI: a ZIP with a JSON file for each advisory. It is as
old as the day on which somebody fetched it, which is printed. An audit that finds nothing says that
nothing was known then, and no more. Exit codes: 0 nothing found, 1 something found, 66 the copy can't
be read.
"""

from __future__ import annotations

import argparse
import os
import sys
import zipfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec
from packaging.version import InvalidVersion, Version

from console.supply.lock import LOCKS, Pin, normal, pins
from telemetry.decoder import Limits, Malformed, decode

ADVISORY_BYTES_MAX: Final = 16 << 20
_PYPI: Final = "PyPI"


class NoAdvisories(Exception):
    """Why there is nothing to compare with, in a sentence."""


class Range(msgspec.Struct, frozen=True):
    type: str = ""
    events: list[dict[str, str]] = []


class Package(msgspec.Struct, frozen=True):
    name: str = ""
    ecosystem: str = ""


class Affected(msgspec.Struct, frozen=True):
    package: Package = Package()
    ranges: list[Range] = []
    versions: list[str] = []


class Advisory(msgspec.Struct, frozen=True):
    id: str
    summary: str = ""
    aliases: list[str] = []
    withdrawn: str | None = None
    modified: str = ""
    affected: list[Affected] = []


@dataclass(frozen=True, slots=True)
class Finding:
    lock: str
    pin: Pin
    advisory: Advisory


_DECODER: Final = msgspec.json.Decoder(Advisory)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="make audit-offline", description=__doc__)
    parser.add_argument("osv", type=Path, help="all.zip of OSV's export for PyPI")
    parser.add_argument("locks", nargs="*", type=Path, help="default: all of requirements/")
    told = parser.parse_args(arguments)
    locks = told.locks or sorted(LOCKS.glob("*.txt"))
    try:
        found, known, newest = audit(told.osv, {lock.name: pins(lock) for lock in locks})
    except NoAdvisories as error:
        print(error, file=sys.stderr)
        return os.EX_NOINPUT
    for one in found:
        names = ", ".join([one.advisory.id, *one.advisory.aliases])
        print(f"{one.lock}: {one.pin.name} {one.pin.version}: {names}: {one.advisory.summary[:160]}")
    print(
        f"{len(found)} findings; {known:,} advisories, the newest of {newest[:10] or 'an unknown day'}."
    )
    return int(bool(found))


def audit(osv: Path, locks: Mapping[str, Iterable[Pin]]) -> tuple[list[Finding], int, str]:
    """What is known of what is locked; how many advisories were read, and when the newest was changed.
    Raises NoAdvisories."""
    wanted: dict[str, list[tuple[str, Pin]]] = defaultdict(list)
    for lock, every in locks.items():
        for pin in every:
            wanted[pin.name].append((lock, pin))
    found, known, newest = [], 0, ""
    for advisory in _advisories(osv):
        known += 1
        newest = max(newest, advisory.modified)
        if advisory.withdrawn:
            continue
        for affected in advisory.affected:
            if affected.package.ecosystem != _PYPI:
                continue
            for lock, pin in wanted.get(normal(affected.package.name), ()):
                if concerns(affected, pin.version):
                    found.append(Finding(lock, pin, advisory))
    if not known:
        raise NoAdvisories(f"{osv} has no advisories in it.")
    unique = {(one.lock, one.pin.name, one.pin.version, one.advisory.id): one for one in found}
    return [unique[key] for key in sorted(unique)], known, newest


def concerns(affected: Affected, version: str) -> bool:
    """Whether a version is listed or lies in a range. One that can't be compared counts as affected."""
    if version in affected.versions:
        return True
    try:
        ours = Version(version)
        return any(_is_in(one, ours) for one in affected.ranges if one.type == "ECOSYSTEM")
    except InvalidVersion:
        return True


def _is_in(one: Range, ours: Version) -> bool:
    """Events in order: from `introduced` on, before `fixed`, up to `last_affected`."""
    inside = False
    for event in one.events:
        if "introduced" in event:
            inside = inside or event["introduced"] == "0" or ours >= Version(event["introduced"])
        elif "fixed" in event:
            inside = inside and ours < Version(event["fixed"])
        elif "last_affected" in event:
            inside = inside and ours <= Version(event["last_affected"])
    return inside


def _advisories(osv: Path) -> Iterator[Advisory]:
    try:
        with zipfile.ZipFile(osv) as archive:
            for entry in archive.infolist():
                if not entry.filename.endswith(".json"):
                    continue
                if entry.file_size > ADVISORY_BYTES_MAX:
                    raise NoAdvisories(f"{entry.filename} is larger than an advisory can be.")
                yield decode(archive.read(entry), _DECODER, Limits(ADVISORY_BYTES_MAX))
    except (OSError, zipfile.BadZipFile, Malformed) as error:
        raise NoAdvisories(f"{osv} can't be read as OSV's export: {error}.") from error


if __name__ == "__main__":
    sys.exit(main())
