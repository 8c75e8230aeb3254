"""THREAT_MODEL.md and docs/findings.md name tests that there are."""

from __future__ import annotations

import re

import pytest

from console.environment import PROJECT

NAMED = re.compile(r"`(tests/[\w/]+\.py)(?:::(\w+))?`")
PAGE = (PROJECT / "THREAT_MODEL.md").read_text()
FINDINGS = (PROJECT / "docs" / "findings.md").read_text()


@pytest.mark.parametrize(("file", "name"), sorted(set(NAMED.findall(PAGE + FINDINGS))))
def test_what_they_name_is_a_test(file: str, name: str) -> None:
    text = (PROJECT / file).read_text()
    assert "def test_" in text
    assert not name or f"def {name}" in text


def test_every_finding_has_one() -> None:
    rows = [line for line in FINDINGS.splitlines() if re.match(r"\| \d", line)]
    assert {int(row.split(" | ")[0].strip("| ")) for row in rows} == set(range(1, 17))
    assert [row for row in rows if not NAMED.search(row)] == []


def test_every_answer_and_every_actor_has_one() -> None:
    """But for root on the console's machine, against whom there is nothing."""
    for title in ("Who holds which credential", "Threats and answers"):
        section = PAGE.split(f"## {title}")[1].split("\n## ")[0]
        rows = [line for line in section.splitlines() if line.startswith("| ")][1:]
        without = [row for row in rows if not NAMED.search(row)]
        assert [row.split(" | ")[0] for row in without] in ([], ["| root on the console's machine"])
        assert len(rows) > 10
