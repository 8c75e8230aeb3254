"""Specs are read from YAML and JSON alike, and what is wrong with one is told with its line."""

from __future__ import annotations

import json
import re

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from console.workloads import spec
from console.workloads.spec import FORMS, Template, WorkloadSpec, Wrong
from console.workloads.wrong_values import in_words

TEXT = """\
name: chat
model: example/chat-8b
tokens_max: 32768
engine:
  kind: emulator
  emulator: {bytes_per_token: 1KiB, parameters: 8e9}
replicas: 2
rollout: {deadline_seconds: 10m}
"""
VALUES = {
    "name": "chat",
    "model": "example/chat-8b",
    "tokens_max": 32768,
    "engine": {"kind": "emulator", "emulator": {"bytes_per_token": 1024, "parameters": 8e9}},
    "replicas": 2,
    "rollout": {"deadline_seconds": 600},
}


def problems(text: str) -> list[str]:
    with pytest.raises(Wrong) as error:
        spec.parse(text)
    return [str(one) for one in error.value.problems]


def test_yaml_json_and_values_are_the_same_spec() -> None:
    read = spec.parse(TEXT)
    assert read == spec.parse(json.dumps(VALUES, indent=1)) == spec.from_values(VALUES)
    assert (read.rollout.deadline_seconds, read.engine.emulator.bytes_per_token) == (600.0, 1024)  # type: ignore[union-attr]


def test_what_is_written_is_read_as_the_same() -> None:
    read = spec.parse(TEXT.replace("kind: emulator\n", 'kind: emulator\n  environment: {EMPTY: ""}\n'))
    assert spec.parse(spec.dump(read)) == read
    assert read.engine.environment == {"EMPTY": ""}
    assert spec.read(Template, json.loads(json.dumps(spec.spelled_out(read.template)))) == read.template


def test_whole_numbers_are_written_as_such_as_far_as_they_are_exact() -> None:
    texts = {
        f"{said}: {number}": spec.as_yaml(spec.shown({said: float(number)})).strip()
        for said, number in (("one", "70e9"), ("two", "1e15"), ("half", "0.5"), ("huge", "1e20"))
    }
    assert texts == {
        "one: 70e9": "one: 70000000000",
        "two: 1e15": "two: 1000000000000000",
        "half: 0.5": "half: 0.5",
        "huge: 1e20": "huge: 1.0e+20",
    }


def test_all_that_is_wrong_is_told_with_its_line() -> None:
    text = "name: Chat\nmodel: m\nshape: 1\nengine:\n  kind: emulator\n  emulator:\n    domains: 0\n"
    found = problems(f"{text}rollout:\n  deadline_seconds: soon\n")
    assert [one.partition(":")[0] for one in found] == [
        "line 9, rollout.deadline_seconds",
        "line 1, name",
        "line 3, shape",
        "line 7, engine.emulator.domains",
        "`tokens_max` is missing.",
    ]


@pytest.mark.parametrize(
    ("line", "told"),
    [
        (
            "name: Talk",
            "name: It has to be lower-case letters, digits and dashes, no dash at an end, 36 at most.",
        ),
        ("replicas: many", "replicas: It has to be a whole number, and is text."),
        ("tokens_max: 0", "tokens_max: It has to be at least 2."),
        ("model: ''", "model: It has to have at least 1 character."),
        ("orgs: 7", "orgs: It has to be "),
        (
            "engine: {kind: command, environment: {lower: a}}",
            "engine.environment: It has to be upper-case ",
        ),
        ("weights: {source: 7}", "weights.source: It has to be text, and is a whole number."),
    ],
)
def test_a_field_says_what_it_takes_in_words(line: str, told: str) -> None:
    assert any(one.partition(", ")[2].startswith(told) for one in problems(line)), problems(line)


def test_every_pattern_of_a_spec_has_words() -> None:
    patterns = set(
        re.findall(r"pattern=('(?:[^'\\\\]|\\\\.)*')", repr(msgspec.inspect.type_info(WorkloadSpec)))
    )
    told = {one: in_words(f"Expected `str` matching regex {one}", FORMS) for one in patterns}
    assert len(told) > 5
    assert [one for one, words in told.items() if words.startswith("Expected")] == []


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("a: [1\n", "line 2: "),
        ("", "The spec is empty."),
        ("- 1", "A spec is a mapping"),
        ("name: a\n---\nname: b", "line 2: One spec at a time"),
        ("x: &a 1\ny: *a", "line 2: Aliases"),
        ("name: a\nname: b", "line 2, name: It is said twice."),
        ("? [1]\n: 2", "line 1: A key is a name."),
        ("[" * 9 + "]" * 9, "deeper"),
    ],
)
def test_what_is_no_spec_is_refused(text: str, told: str) -> None:
    assert told in "\n".join(problems(text))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"engine": {"kind": "vllm"}}, "engine: vllm needs weights."),
        ({"tokenizer": {}}, "tokenizer: Name a family, a folder, or"),
        ({"boxes_per_replica": 0}, "at least one box"),
        ({"rollout": {"max_surge": 0}}, "One of max_surge and max_unavailable"),
    ],
)
def test_what_contradicts_itself_is_refused(change: dict[str, object], told: str) -> None:
    with pytest.raises(Wrong, match=told.replace("(", r"\(")):
        spec.from_values({**VALUES, **change})


def test_a_template_is_bounded_however_it_is_written() -> None:
    """The leader reads it with each decision."""
    files = {f"model-{number:04}.safetensors": "0" * 64 for number in range(800)}
    large = {**VALUES, "weights": {"source": "s3://a/b", "files": files}}
    for told in (spec.parse, lambda text: spec.from_values(json.loads(text))):
        with pytest.raises(Wrong, match=r"has [0-9]{5} bytes as JSON: at most 65536"):
            told(json.dumps(large))
    many = {f"{number}": "0" * 64 for number in range(1001)}
    with pytest.raises(Wrong, match=r"weights.files: It has to have at most 1000 entries"):
        spec.from_values({**VALUES, "weights": {"source": "s3://a/b", "files": many}})
    few = dict(list(files.items())[:500])
    spec.from_values({**VALUES, "weights": {"source": "s3://a/b", "files": few}})


def test_scalars_are_what_they_look_like() -> None:
    """In YAML 1.1 `on` is true, `010` is 8 and `1:30` is 90."""
    for word in ("on", "010", "1:30", "2026-01-01"):
        assert spec.parse(TEXT.replace("example/chat-8b", word)).model == word


def test_a_patch_changes_what_it_says() -> None:
    read = spec.parse(TEXT)
    assert spec.merged(read, {}) == read
    changed = spec.merged(read, {"replicas": 3, "engine": {"emulator": {"domains": 2}}})
    assert changed.replicas == 3
    assert changed.engine.emulator is not None
    assert (changed.engine.emulator.domains, changed.engine.emulator.bytes_per_token) == (2, 1024)
    assert spec.merged(read, {"engine": {"emulator": None}}).engine.emulator is None


def test_a_digest_is_of_the_template_only() -> None:
    read = spec.parse(TEXT)
    in_place = {"replicas": 5, "orgs": ["acme"], "rollout": {"max_surge": 2}}
    assert spec.merged(read, in_place).template.digest == read.template.digest
    assert spec.merged(read, {"tokens_max": 1024}).template.digest != read.template.digest


def test_orgs_are_by_default_the_owner() -> None:
    assert spec.parse(TEXT).orgs_said == "all"
    assert spec.parse(f"{TEXT}org: acme\n").orgs_said == ("acme",)
    assert spec.parse(f"{TEXT}orgs: [globex, acme, acme]\n").orgs_said == ("acme", "globex")


@given(st.text(max_size=300) | st.text(alphabet="{}[]:,-&*? \n\"'ab1", max_size=60))
def test_nothing_that_is_written_breaks_the_parser(text: str) -> None:
    try:
        read = spec.parse(text)
    except Wrong:
        return
    msgspec.json.encode(read)
