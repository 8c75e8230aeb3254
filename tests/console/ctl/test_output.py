"""Tables, values and their fit. Without a console."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st
from rich.cells import cell_len

from console.ctl.cells import form_of, shown, spoken
from console.ctl.output import CELL_MIN, GAP, Screen, fitting, widths_of
from console.ctl.resources import Form, Resource
from console.ctl.waits import reading_of

NOW = 1_800_000_000.0


@pytest.mark.parametrize(
    ("value", "form", "text"),
    [
        (None, "text", "-"),
        (1 << 40, "size", "1 TiB"),
        (0, "size", "0 B"),
        (90, "duration", "1 min 30 s"),
        ("2027-01-15T07:00:00Z", "age", "1 h ago"),
        ("not a time", "age", "not a time"),
        ([], "count", "0"),
        ([1, 2], "count", "2"),
        (7, "count", "7"),
        (["a", "b"], "text", "a,b"),
        ([334, 472], "text", "334, 472"),
        ([59.5, 1798.2171713049975], "duration", "59.5 s, 29 min 58 s"),
        (195312500, "rate", "186 MiB/s"),
        ("all", "text", "all"),
        (False, "text", "no"),
        (True, "text", "yes"),
        (40, "percent", "40 %"),
        (0, "percent", "0 %"),
        (2.50, "text", "2.5"),
        (999_999.5, "text", "1000000"),
        (7e10, "text", "70000000000"),
        (1e300, "text", "1e+300"),
        ("a\x1b]0;b\nc", "text", "a ]0;b c"),
    ],
)
def test_values_are_shown_as_people_read_them(value: Any, form: Form, text: str) -> None:
    assert shown(value, form, NOW) == text


@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("memory_bytes", "size"),
        ("wait_seconds", "duration"),
        ("bytes_per_second", "rate"),
        ("created_at", "age"),
        ("state_since", "age"),
        ("state", "text"),
    ],
)
def test_names_say_what_fields_are(name: str, form: Form) -> None:
    assert form_of(name) == form


@given(
    st.lists(
        st.lists(st.text("abc 東\x7f", max_size=40), min_size=3, max_size=3), min_size=1, max_size=5
    ),
    st.integers(10, 100),
)
def test_a_table_fits_where_it_can_and_keeps_names(rows: list[list[str]], room: int) -> None:
    widths = fitting(widths_of(rows), room)
    assert widths[0] == widths_of(rows)[0]
    taken = sum(widths) + len(GAP) * 2
    assert taken <= room or all(width <= CELL_MIN for width in widths[1:])
    assert fitting(widths_of(rows), None) == widths_of(rows)


def test_columns_of_wide_letters_are_aligned() -> None:
    stream = io.StringIO()
    resource = Resource("node", "nodes", "/nodes", ("name", "state"), "")
    Screen(stream).listing(
        resource, [{"name": "東京", "state": "ready"}, {"name": "ax-1", "state": "lost"}]
    )
    lines = stream.getvalue().splitlines()
    assert [
        cell_len(line[: line.index(state)])
        for line, state in zip(lines, ("STATE", "ready", "lost"), strict=True)
    ] == [7] * 3


def test_every_field_has_a_label_of_its_own() -> None:
    stream = io.StringIO()
    Screen(stream).described({"incomplete": 3, "incomplete_at": {"ax-1": 3}, "seen_at": None})
    labels = [line.partition(":")[0] for line in stream.getvalue().splitlines()]
    assert labels == ["Incomplete", "Incomplete at", "  Ax-1", "Seen"]


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
@given(text=st.text(max_size=60))
def test_every_terminal_can_be_spoken_to(encoding: str, text: str) -> None:
    spoken(text.encode("utf-8", "replace").decode(), encoding).encode(encoding)


@given(
    st.recursive(
        st.none() | st.booleans() | st.text() | st.integers(),
        lambda one: st.lists(one) | st.dictionaries(st.text(), one),
        max_leaves=6,
    )
)
@example({"\x85": "a\u2028b\n"})
@pytest.mark.parametrize("encoding", ["ascii", "utf-8"])
def test_documents_say_the_same_in_every_encoding(encoding: str, value: Any) -> None:
    value = json.loads(json.dumps(value).encode("utf-8", "replace"))
    for form in ("json", "yaml"):
        raw = io.BytesIO()
        stream = io.TextIOWrapper(
            raw, encoding=encoding, errors="surrogatepass" if encoding == "utf-8" else "strict"
        )
        Screen(stream).document(form, [{"value": value}], is_list=False)
        stream.flush()
        text = raw.getvalue().decode(encoding, "surrogatepass")
        read = json.loads(text) if form == "json" else yaml.safe_load(text)
        assert read == {"value": value}


@pytest.mark.parametrize(
    ("condition", "item", "holds"),
    [
        ("state=ready", {"state": "ready"}, True),
        ("boxes.actual=2", {"boxes": {"actual": 2}}, True),
        ("running=true", {"running": True}, True),
        ("running=true", {"running": False}, False),
        ("Ready", {"conditions": [{"type": "Ready", "status": "True"}]}, True),
        ("condition=Ready", {"conditions": [{"type": "Ready", "status": "Unknown"}]}, False),
        ("Ready=False", {"conditions": [{"type": "Ready", "status": "False"}]}, True),
        ("Ready", {}, False),
        ("delete", {}, False),
        ("done", {"done": True, "state": "failed"}, True),
        ("succeeded", {"done": True, "state": "failed"}, False),
    ],
)
def test_conditions_are_read(condition: str, item: Any, holds: bool) -> None:  # noqa: FBT001
    assert reading_of(condition)(item) is holds
