"""The glossary has every term once, and what people read has none of the words that it bans."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator

import pytest

from console.alerts.rules.catalogue import RULES
from console.api.v1 import api
from console.environment import PROJECT

GLOSSARY = PROJECT / "docs" / "glossary.md"
BANNED_HEADING = "## Words we do not use"
PACKAGES = (
    "cluster_server",
    "console",
    "inference_brain",
    "kvss_agent",
    "swdriver_shim",
    "telemetry",
    "workload_manager",
    "benchmarks",
)
# What is shown to people where it is passed by these names: `--help`, forms, settings, metrics.
SHOWN = {"description", "epilog", "help", "help_text", "label", "summary", "title", "verbose_name"}
# Words in names of the API's schemas that are plain English. What is none of these is in the glossary.
PLAIN = """
add answer ask asked assignee bulk call candidate certificate change cluster comment component count
counts description detail difference effect error explained fault field figure fired fleet flip
found group heartbeat history id in info join joins key keys lagging limit line link live made many me
memory move name new not on out outcome overview page patch plan planned point progress proof put
reach reason recent removal remove removed report reported request requests resize restore result
retiring revoked root rotation rule rules run running says scheduled seen selected session sessions
setting settings silent size sizes spine state statistics status summary taken threshold thresholds
timeline transition transitions undo unreachable updated upgrade usage value waiting with worth
"""


def rows(text: str) -> list[list[str]]:
    """The cells of all table rows but the headings."""
    lines = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("| ")]
    return [
        [cell.strip() for cell in cells] for cells in lines if cells[0].strip() not in ("term", "not")
    ]


def terms_and_meanings() -> list[tuple[str, str]]:
    terms, _, _ = GLOSSARY.read_text().partition(BANNED_HEADING)
    return [(term, cells[1]) for cells in rows(terms) for term in re.findall(r"\*\*(.+?)\*\*", cells[0])]


def banned() -> list[str]:
    _, _, words = GLOSSARY.read_text().partition(BANNED_HEADING)
    return [phrase for cells in rows(words) for phrase in cells[0].split("; ")]


def pattern_of(phrases: list[str]) -> re.Pattern[str]:
    """Finds any of these as whole words, over line ends too."""
    alternatives = (re.escape(phrase).replace(r"\ ", r"\s+") for phrase in phrases)
    return re.compile(rf"\b(?:{'|'.join(alternatives)})\b", re.IGNORECASE)


def test_each_term_is_explained_once_in_a_sentence() -> None:
    found = terms_and_meanings()
    names = [term.lower() for term, _ in found]
    assert len(names) > 80
    assert sorted(names) == sorted(set(names))
    for term, meaning in found:
        assert meaning.endswith("."), term
        assert not re.search(r"\. [A-Z]", meaning), f"{term}: one sentence"


def test_what_the_api_speaks_of_is_explained() -> None:
    schemas = api.get_openapi_schema()["components"]["schemas"]
    names = {word.lower() for name in schemas for word in re.findall(r"[A-Z][a-z0-9]*", name)}
    explained = {word for term, _ in terms_and_meanings() for word in re.split(r"[ -]", term.lower())}
    explained |= {f"{word}s" for word in explained}
    assert names - explained - set(PLAIN.split()) == set()


@pytest.mark.parametrize("name", ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md"])
def test_a_newcomer_is_led_to_the_glossary(name: str) -> None:
    assert "(docs/glossary.md)" in (PROJECT / name).read_text()


def texts() -> Iterator[tuple[str, str]]:
    """What people read, each with where it is from."""
    yield "API schema", json.dumps(api.get_openapi_schema(), ensure_ascii=False)
    yield "alert catalogue", "\n".join(map(repr, RULES))
    paths = [*PROJECT.glob("templates/**/*.*"), *PROJECT.glob("docs/**/*.md"), *PROJECT.glob("*.md")]
    for path in sorted(paths):
        if path.name != "CHANGELOG.md":  # it says what things were called
            text = path.read_text()
            yield str(path.relative_to(PROJECT)), text.partition(BANNED_HEADING)[0]


def shown_strings(source: str) -> Iterator[str]:
    """Strings that a module passes on for people to read, and what it says of itself."""
    tree = ast.parse(source)
    yield ast.get_docstring(tree) or "" if "ArgumentParser" in source else ""
    for node in ast.walk(tree):
        if isinstance(node, ast.keyword) and node.arg in SHOWN:
            yield from (
                part.value
                for part in ast.walk(node.value)
                if isinstance(part, ast.Constant) and isinstance(part.value, str)
            )


def test_no_banned_word_is_read() -> None:
    pattern = pattern_of(banned())
    found = [f"{where}: {match.group()}" for where, text in texts() for match in pattern.finditer(text)]
    assert found == [], "docs/glossary.md says what to write instead"


def test_no_banned_word_is_shown_by_a_program() -> None:
    pattern = pattern_of(banned())
    found = []
    for package in PACKAGES:
        for path in sorted((PROJECT / package).rglob("*.py")):
            where, source = str(path.relative_to(PROJECT)), path.read_text()
            if pattern.search(source):
                strings = "\n".join(shown_strings(source))
                found += [f"{where}: {match.group()}" for match in pattern.finditer(strings)]
    assert found == [], "docs/glossary.md says what to write instead"


@pytest.mark.parametrize("text", ["HELD\n  against", "(in hand)", "last heard: never"])
def test_what_is_found(text: str) -> None:
    assert pattern_of(["held against", "in hand", "heard"]).search(text)


def test_a_part_of_a_word_is_not_found() -> None:
    assert not pattern_of(["in hand", "heard"]).search("in handovers, unheard")
