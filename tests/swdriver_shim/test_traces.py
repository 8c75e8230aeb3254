"""Traces: what is in the files, in order of arrival, or a sentence that says where a file is wrong."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from console.environment import PROJECT
from swdriver_shim.replay.traces import Malformed, Request, read, tenant


def conversations(folder: Path, *rows: dict[str, Any] | str) -> Path:
    file = folder / "conversation.jsonl"
    file.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return file


def row(at_ms: float, tokens: int, *blocks: int, out: int = 7) -> dict[str, Any]:
    return {"timestamp": at_ms, "input_length": tokens, "output_length": out, "hash_ids": list(blocks)}


def session(folder: Path, name: str, *requests: dict[str, Any]) -> None:
    told = {"id": name, "block_size": 64, "requests": list(requests)}
    (folder / f"{name}.json").write_text(json.dumps(told))


def asked(at_s: float, tokens: int, *blocks: int, **more: Any) -> dict[str, Any]:
    return {"t": at_s, "in": tokens, "out": 3, "hash_ids": list(blocks), **more}


def test_conversations_are_read_in_their_order(tmp_path: Path) -> None:
    file = conversations(tmp_path, row(0, 1030, 0, 1, 2), row(0, 512, 0), row(1500, 600, 0, 9))
    first, second, third = read(file)
    assert first == Request(0.0, "1", (0, 1, 2), 512, 1030, 7, "conversation.jsonl")
    assert (second.session, third.session) == ("0", "9")
    assert third.at_s == 1.5


def test_a_last_block_that_is_not_full_is_a_tail(tmp_path: Path) -> None:
    full, cut = read(conversations(tmp_path, row(0, 1024, 0, 1), row(0, 1025, 0, 1, 2)))
    assert (full.whole_blocks, len(full.blocks)) == (2, 2)
    assert (cut.whole_blocks, len(cut.blocks)) == (2, 3)


def test_a_conversation_that_goes_on_stays_with_its_session(tmp_path: Path) -> None:
    rows = [row(0, 1024, 0, 5), row(1, 1536, 0, 5, 6), row(2, 1536, 0, 7, 8)]
    first, again, other = read(conversations(tmp_path, *rows))
    assert first.session == again.session != other.session


def test_sessions_are_merged_by_time_and_share_no_ids(tmp_path: Path) -> None:
    session(tmp_path, "a", asked(0.0, 128, 1, 2), asked(9.0, 192, 1, 2, 3))
    session(tmp_path, "b", asked(4.0, 128, 1, 2))
    requests = list(read(tmp_path))
    assert [(request.session, request.at_s) for request in requests] == [("a", 0), ("b", 4), ("a", 9)]
    first, other, again = (request.blocks for request in requests)
    assert again[:2] == first
    assert not set(first) & set(other)


def test_requests_of_sub_agents_are_found_where_they_lie(tmp_path: Path) -> None:
    inner = {"t": 1.0, "type": "subagent", "requests": [asked(2.0, 64, 7), asked(5.0, 64, 8)]}
    session(tmp_path, "a", asked(0.0, 64, 1), inner, asked(4.0, 64, 2))
    assert [request.at_s for request in read(tmp_path / "a.json")] == [0, 2, 4, 5]


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("{", "line 2: Expecting"),
        ("[]", "line 2: not a JSON object"),
        ({"timestamp": 5}, "line 2: input_length is None, not a number"),
        (row(-1, 512, 0), "line 2: timestamp is -1, not a number from 0"),
        (row(5, 512.5, 0), "line 2: input_length is 512.5, not a whole number"),  # type: ignore[arg-type]
        (row(5, 512, 0, 1), "line 2: 2 blocks for 512 tokens"),
        (row(5, 1024, 3, 3), "line 2: the same block twice"),
        (row(5, 512, "x"), "line 2: hash_ids are whole numbers"),  # type: ignore[arg-type]
        ({**row(5, 512), "hash_ids": 3}, "line 2: hash_ids is not a list"),
        (row(4, 512, 0), "line 2: earlier than the line before"),
    ],
)
def test_a_malformed_line_is_told(tmp_path: Path, line: dict[str, Any] | str, complaint: str) -> None:
    file = conversations(tmp_path, row(5, 512, 0), line)
    with pytest.raises(Malformed, match=complaint) as told:
        list(read(file))
    assert str(file) in str(told.value)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("{\n\n!", r"a\.json, line 3"),
        ('{"requests": []}', "block_size is None"),
        ('{"block_size": 0, "requests": []}', "block_size is 0"),
        ('{"block_size": 64, "requests": [{"t": 0, "hash_ids": [1]}]}', "request 1: in is None"),
        (
            '{"block_size": 64, "requests": [{"t": 0, "in": 9, "out": 1, "hash_ids": [1, 2]}]}',
            "request 1: 2 blocks for 9 tokens",
        ),
        (
            '{"block_size": 64, "requests": ' + '[{"requests":' * 20 + "[]" + "}]" * 20 + "}",
            "nested deeper",
        ),
    ],
)
def test_a_malformed_session_is_told(tmp_path: Path, text: str, complaint: str) -> None:
    file = tmp_path / "a.json"
    file.write_text(text)
    with pytest.raises(Malformed, match=complaint):
        list(read(file))


def test_tenants_are_dealt_by_a_seed() -> None:
    names = [f"session {number}" for number in range(400)]
    dealt = [tenant(name, 4, seed=1) for name in names]
    assert dealt == [tenant(name, 4, seed=1) for name in names]
    assert dealt != [tenant(name, 4, seed=2) for name in names]
    assert all(70 < dealt.count(number) < 130 for number in range(4))


def test_the_examples_of_the_docs_are_traces(tmp_path: Path) -> None:
    page = (PROJECT / "docs" / "replay.md").read_text()
    line, session = re.findall(r"^```json\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    (tmp_path / "conversations.jsonl").write_text(line)
    (tmp_path / "session.json").write_text(session)
    assert [one.input_tokens for one in read(tmp_path / "conversations.jsonl")] == [1100]
    assert [one.input_tokens for one in read(tmp_path / "session.json")] == [100]
