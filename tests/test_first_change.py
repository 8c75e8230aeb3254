"""docs/first-change.md, followed to the letter in a copy of the project."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from console.environment import PROJECT

BLOCK: Final = re.compile(r"^```(\w+)\n(.*?)^```\n", re.MULTILINE | re.DOTALL)
TUTORIAL: Final = PROJECT / "docs/first-change.md"
RULES: Final = "console/alerts/rules/nodes.py"
METRICS: Final = "kvss_agent/metrics.py"
TEST: Final = "tests/console/alerts/test_conditions.py"
AGENT: Final = "tests/kvss_agent/test_process.py"
RUNBOOK: Final = "docs/runbooks/open-files-near-limit.md"
RUNBOOKS: Final = "docs/runbooks/README.md"
ROW: Final = (
    "| open-files-near-limit | none: only in the console | "
    "[open-files-near-limit.md](open-files-near-limit.md) |\n"
)


def blocks(language: str) -> list[tuple[str, str]]:
    """Each with the words before it."""
    text, ends, found = TUTORIAL.read_text(), 0, []
    for block in BLOCK.finditer(text):
        if block[1] == language:
            found.append((text[ends : block.start()], block[2]))
        ends = block.end()
    return found


def put_below(source: str, said: str, code: str) -> str:
    """The code, indented, as the line below the statement that the words before it name."""
    named = re.findall(r"below\s+`([^`…]+)", said)[-1].strip()
    place = re.search(rf"^( *){re.escape(named)}.*\n", source, re.MULTILINE)
    assert place, f"nothing in the code begins with {named}"
    lines = "".join(f"{place[1]}{line}\n" for line in code.splitlines())
    return source[: place.end()] + lines + source[place.end() :]


def as_last(source: str, code: str) -> str:
    """The code as the last element of the tuple that the file ends with."""
    assert source.endswith(",\n)\n")
    lines = "".join(f"    {line}".rstrip() + "\n" for line in code.splitlines())
    return source.removesuffix(")\n") + lines.removesuffix("\n") + ",\n)\n"


def run(folder: Path, *arguments: str) -> None:
    done = subprocess.run(
        [sys.executable, *arguments], cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_the_first_change_works_as_it_is_written(tmp_path: Path) -> None:
    here = tmp_path / "tidegate"
    shutil.copytree(
        PROJECT,
        here,
        symlinks=True,
        ignore=shutil.ignore_patterns(".*", "__pycache__", "images", "shared"),
    )
    (declared, metric), (collected, values), (_, rule), (_, test) = blocks("python")
    [(_, runbook)] = blocks("markdown")
    metrics = put_below((here / METRICS).read_text(), declared, metric)
    (here / METRICS).write_text(put_below(metrics, collected, values))
    (here / RULES).write_text(as_last((here / RULES).read_text(), rule))
    (here / RUNBOOK).write_text(runbook)
    rows = (here / RUNBOOKS).read_text()
    (here / RUNBOOKS).write_text(rows.replace("| tier2-near-cap |", f"{ROW}| tier2-near-cap |", 1))
    (here / TEST).write_text(f"{(here / TEST).read_text()}\n\n{test}")

    run(here, "-m", "console.write_docs")
    assert "kvss_open_files" in (here / "docs/metrics.md").read_text()
    assert "open-files-near-limit" in (here / "docs/alert-rules.md").read_text()
    run(here, "-m", "ruff", "check", METRICS, RULES, TEST)
    run(here, "-m", "ruff", "format", "--check", METRICS, RULES, TEST)
    run(
        here,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        TEST,
        AGENT,
        "-k",
        "limit_of_open_files or prometheus_reads",
    )
