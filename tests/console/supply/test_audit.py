"""The audit without a network: a local copy of the advisories against the locks."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import pytest

from console.supply import audit
from console.supply.lock import Pin


def copy_of(directory: Path, *advisories: dict[str, Any]) -> Path:
    path = directory / "all.zip"
    with zipfile.ZipFile(path, "w") as archive:
        for one in advisories:
            archive.writestr(f"{one['id']}.json", json.dumps(one))
        archive.writestr("README.txt", "no advisory")
    return path


def advisory(name: str, *events: dict[str, str], **more: Any) -> dict[str, Any]:
    affected = {
        "package": {"name": name, "ecosystem": "PyPI", "purl": "ignored"},
        "ranges": [{"type": "ECOSYSTEM", "events": list(events)}],
        "versions": [],
    }
    told = {
        "id": f"TEST-{name}",
        "modified": "2026-02-03T00:00:00Z",
        "summary": "Bad.",
        "affected": [affected],
    }
    return {**told, **more}


def found_in(path: Path, *pinned: Pin) -> list[str]:
    found, _, _ = audit.audit(path, {"run.txt": pinned})
    return [f"{one.pin.name} {one.pin.version} {one.advisory.id}" for one in found]


@pytest.mark.parametrize(
    ("version", "is_affected"),
    [
        ("1.9", False),
        ("2.0", True),
        ("2.10", True),
        ("2.11rc1", True),
        ("2.11", False),
        ("3.4", True),
        ("3.5", False),
    ],
)
def test_a_version_in_a_range_is_found(tmp_path: Path, version: str, *, is_affected: bool) -> None:
    events = ({"introduced": "2"}, {"fixed": "2.11"}, {"introduced": "3"}, {"last_affected": "3.4"})
    path = copy_of(tmp_path, advisory("Some_Thing", *events))
    assert bool(found_in(path, Pin("some-thing", version))) is is_affected


def test_listed_versions_count_withdrawn_advisories_and_other_ecosystems_do_not(tmp_path: Path) -> None:
    listed = advisory("listed")
    listed["affected"][0]["versions"] = ["1.0.post1"]
    elsewhere = advisory("elsewhere", {"introduced": "0"})
    elsewhere["affected"][0]["package"]["ecosystem"] = "npm"
    gone = advisory("gone", {"introduced": "0"}, withdrawn="2026-01-01T00:00:00Z")
    path = copy_of(tmp_path, listed, elsewhere, gone)
    pinned = [Pin(name, "1.0.post1") for name in ("listed", "elsewhere", "gone")]
    assert found_in(path, *pinned) == ["listed 1.0.post1 TEST-listed"]


def test_the_command_says_what_it_found_and_how_old_its_knowledge_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lock = tmp_path / "run.txt"
    lock.write_text("bad==1.0 \\\n    --hash=sha256:%s\n" % ("0" * 64))
    path = copy_of(tmp_path, advisory("bad", {"introduced": "0"}, aliases=["CVE-2026-1"]))
    assert audit.main([str(path), str(lock)]) == 1
    said = capsys.readouterr().out
    assert "run.txt: bad 1.0: TEST-bad, CVE-2026-1: Bad." in said
    assert "1 findings; 1 advisories, the newest of 2026-02-03." in said
    lock.write_text("good==1.0\n")
    assert audit.main([str(path), str(lock)]) == 0


def test_without_advisories_nothing_is_said_to_be_fine(tmp_path: Path) -> None:
    broken = tmp_path / "broken.zip"
    broken.write_bytes(b"PK nonsense")
    for path in (broken, tmp_path / "absent.zip", copy_of(tmp_path)):
        assert audit.main([str(path)]) == 66
