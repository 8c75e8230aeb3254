"""What the tests cost: how it is shown."""

from __future__ import annotations

import json
from pathlib import Path

from tests.costs import show


def test_costs_are_summed_by_phase_file_and_test_with_the_most_expensive_first(tmp_path: Path) -> None:
    file = tmp_path / "costs.jsonl"
    rows = [
        ("", "collection", 8.0, 9.0),
        ("tests/test_a.py::test_one", "setup", 0.5, 1.0),
        ("tests/test_a.py::test_one", "call", 1.5, 2.0),
        ("tests/test_b.py::test_two@tests/test_b.py", "call", 4.0, 30.0),
    ]
    names = ("test", "phase", "seconds", "wall_seconds")
    file.write_text(
        "".join(
            json.dumps({"worker": "gw0", **dict(zip(names, row, strict=True))}) + "\n" for row in rows
        )
    )
    assert [line.split() for line in show(file) if " s " in line] == [
        ["8.0", "s", "9.0", "s", "collection"],
        ["5.5", "s", "32.0", "s", "call"],
        ["0.5", "s", "1.0", "s", "setup"],
        ["4.0", "s", "30.0", "s", "tests/test_b.py"],
        ["2.0", "s", "3.0", "s", "tests/test_a.py"],
        ["4.0", "s", "30.0", "s", "tests/test_b.py::test_two"],
        ["2.0", "s", "3.0", "s", "tests/test_a.py::test_one"],
    ]
