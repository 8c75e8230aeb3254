"""The bill of materials has all that is locked, in a document of CycloneDX; `make sbom` validates it."""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime
from pathlib import Path

import pytest

from console.supply import sbom
from console.supply.lock import LOCKS, NotALock, Pin, pins

AT = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
# Not by the code under test: whatever has a version pinned at the beginning of a line.
PINNED = re.compile(r"^([A-Za-z0-9._-]+)(?:\[.*?\])?==([^\s;]+)", re.MULTILINE)


@pytest.mark.parametrize("lock", sorted(LOCKS.glob("*.txt")), ids=lambda path: path.name)
def test_every_package_of_a_lock_is_in_the_bill_with_all_its_hashes(lock: Path) -> None:
    text = lock.read_text()
    bill = sbom.bill(pins(lock), at=AT)
    found = {(one["name"], one["version"]) for one in bill["components"]}
    wanted = {(re.sub(r"[-_.]+", "-", name).lower(), version) for name, version in PINNED.findall(text)}
    assert found == wanted
    hashes = {
        each["content"]
        for one in bill["components"]
        for file in one["externalReferences"]
        for each in file["hashes"]
    }
    assert hashes == set(re.findall(r"sha256:([0-9a-f]{64})", text))


def test_it_is_a_whole_document_of_cyclonedx() -> None:
    bill = sbom.bill(pins(LOCKS / "run.txt"), at=AT)
    assert (bill["bomFormat"], bill["specVersion"], bill["version"]) == ("CycloneDX", "1.6", 1)
    assert re.fullmatch(r"urn:uuid:[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", bill["serialNumber"])
    assert bill["metadata"]["timestamp"] == "2026-01-02T03:04:05Z"
    references = [one["bom-ref"] for one in bill["components"]]
    assert len(set(references)) == len(references)
    known = {*references, bill["metadata"]["component"]["bom-ref"]}
    graph = {one["ref"]: set(one["dependsOn"]) for one in bill["dependencies"]}
    assert graph.keys() == known
    assert set().union(*graph.values()) <= known
    reached, waiting = set[str](), [bill["metadata"]["component"]["bom-ref"]]
    while waiting:
        one = waiting.pop()
        if one not in reached:
            reached.add(one)
            waiting += graph[one]
    assert reached == known, "each package is there because of somebody"
    licensed = [one["name"] for one in bill["components"] if "licenses" in one]
    assert {"django", "cryptography", "msgspec"} <= set(licensed)
    assert any(
        "django" in one
        for one in graph[next(ref for ref in references if "celery" not in ref and "channels" in ref)]
    )


def test_the_same_lock_is_the_same_bill() -> None:
    every = pins(LOCKS / "run.txt")
    once, again = sbom.bill(every, at=AT), sbom.bill(reversed(every), at=AT)
    assert json.dumps(once) == json.dumps(again)
    other = sbom.bill([*every, Pin("more", "1")], at=AT)
    assert other["serialNumber"] != once["serialNumber"]


def test_what_is_not_pinned_is_refused_with_its_line(tmp_path: Path) -> None:
    lock = tmp_path / "loose.txt"
    lock.write_text(
        "# by hand\nfine==1 ; sys_platform == 'linux' \\\n    --hash=sha256:%s\nloose>=2\n" % ("0" * 64)
    )
    with pytest.raises(NotALock, match=r"loose\.txt:4 .*loose>=2"):
        pins(lock)
