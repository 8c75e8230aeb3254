"""Frames: what is sent is what is read, however cut; all else is a breach, in bounded memory."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvss_agent.data_plane import wire
from kvss_agent.data_plane.breach import Breach, Cause
from kvss_agent.shard import seal
from kvss_agent.shard.core import BATCH_MAX
from kvss_agent.shard.seal import Miss

NUMBER = st.integers(0, 2**64 - 1)
SLOT = st.integers(0, 2**32 - 1)
SLOTS = st.lists(SLOT, min_size=1, max_size=BATCH_MAX).map(tuple)
BYTES_16 = st.binary(min_size=16, max_size=16)
LISTED_COLUMN = st.builds(wire.ListedColumn, BYTES_16, BYTES_16, NUMBER, NUMBER)
BYTES_32 = st.binary(min_size=32, max_size=32)
TEXT = st.text(max_size=60).filter(str.isprintable)
MILLISECONDS = st.integers(0, 2**32 - 1)
EXTENTS = st.lists(NUMBER, max_size=wire.EXTENTS_MAX).map(tuple)
HEADERS = st.lists(st.binary(min_size=64, max_size=64), min_size=1, max_size=BATCH_MAX)
ANSWER = st.sampled_from(
    [*Miss, *(answer for answer in wire.TierAnswer if answer < wire.TierAnswer.MISS)]
)
TIER_COLUMNS = st.lists(
    st.builds(wire.TierColumn, SLOT, BYTES_16, BYTES_16, NUMBER, NUMBER), min_size=1, max_size=BATCH_MAX
).map(tuple)

FRAMES: st.SearchStrategy[wire.Frame] = st.one_of(
    st.builds(
        wire.Hello,
        st.sampled_from(wire.Role),
        TEXT,
        TEXT,
        BYTES_32,
        st.integers(0, 255),
        st.integers(0, 255),
        st.integers(0, 2**32 - 1),
        TEXT,
    ),
    st.builds(
        wire.Challenge,
        st.integers(0, 255),
        st.sampled_from(wire.Means),
        st.integers(0, 2**32 - 1),
        BYTES_32,
        BYTES_32,
    ),
    st.builds(wire.Proof, BYTES_32),
    st.builds(wire.Welcome, BYTES_16, NUMBER, NUMBER, NUMBER, EXTENTS),
    st.builds(
        wire.Evict,
        NUMBER,
        st.lists(st.tuples(SLOT, st.binary(min_size=64, max_size=64)), min_size=1).map(tuple),
    ),
    st.builds(wire.Count, NUMBER),
    st.builds(wire.Refill, NUMBER, NUMBER, MILLISECONDS, SLOTS),
    st.builds(wire.Refilled, NUMBER, HEADERS.map(tuple)),
    st.builds(wire.Delete, NUMBER, NUMBER, MILLISECONDS, SLOTS, scrub=st.booleans()),
    st.builds(wire.Deleted, NUMBER),
    st.builds(
        wire.Tier,
        NUMBER,
        st.sampled_from([verb for verb in wire.TierVerb if verb is not wire.TierVerb.BORROW]),
        NUMBER,
        MILLISECONDS,
        TIER_COLUMNS,
    ),
    st.builds(
        wire.Tier,
        NUMBER,
        st.just(wire.TierVerb.BORROW),
        NUMBER,
        MILLISECONDS,
        TIER_COLUMNS,
        lender=st.builds(
            wire.Lender,
            TEXT.filter(bool),
            TEXT.filter(bool),
            st.integers(1, 2**20).map(lambda milliseconds: milliseconds / 1000),
            NUMBER,
        ),
    ),
    st.builds(wire.Tiered, NUMBER, st.lists(ANSWER, max_size=BATCH_MAX).map(tuple)),
    st.builds(
        wire.Listed,
        NUMBER,
        st.lists(
            st.builds(wire.ListedColumn, BYTES_16, BYTES_16, NUMBER, NUMBER), max_size=BATCH_MAX
        ).map(tuple),
        st.booleans(),
    ),
    st.builds(wire.Rejected, NUMBER, st.sampled_from(Miss)),
    st.builds(wire.Resized, NUMBER, EXTENTS),
    st.builds(wire.Shrunk, NUMBER),
    st.builds(wire.Goodbye),
    st.builds(wire.Error, st.sampled_from(Cause), TEXT),
)


def feed(reader: wire.FrameReader, data: bytes, pieces: Sequence[int] = ()) -> list[wire.Frame]:
    """Hand these bytes over in pieces of these sizes, then as they are wanted; the frames they make."""
    frames: list[wire.Frame] = []
    sizes = iter(pieces)
    while data:
        place = reader.want()
        assert len(place) > 0
        count = min(len(place), len(data), next(sizes, 1 << 30))
        place[:count] = data[:count]
        data = data[count:]
        found = reader.fed(count)
        if found and not isinstance(found, wire.Filled):
            frames.append(found)
    return frames


@given(st.lists(FRAMES, max_size=4), st.lists(st.integers(1, 40), max_size=50))
def test_what_is_sent_is_what_is_read_however_it_is_cut(
    frames: list[wire.Frame], pieces: list[int]
) -> None:
    reader = wire.FrameReader()
    assert feed(reader, b"".join(frame.encode() for frame in frames), pieces) == frames
    assert reader.between_frames


@given(st.binary(max_size=400))
def test_any_bytes_are_frames_or_a_breach(data: bytes) -> None:
    with contextlib.suppress(Breach):
        feed(wire.FrameReader(), data)


@given(FRAMES, st.data())
def test_a_mutated_frame_is_a_frame_or_a_breach(frame: wire.Frame, data: st.DataObject) -> None:
    raw = bytearray(frame.encode())
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(Breach):
        feed(wire.FrameReader(), bytes(raw))


@pytest.mark.parametrize("text", ["\0", "two\nlines", "\x1b[2J", "\u202e"])
def test_a_text_that_can_not_be_printed_is_a_breach(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver says it of its shards, and the console then could not read the driver's answer."""
    said = wire.Error(Cause.LIMIT, f"so {text} it is")
    [heard] = feed(wire.FrameReader(), said.encode())
    assert isinstance(heard, wire.Error)
    assert heard.sentence.isprintable()
    monkeypatch.setattr(wire, "_printable", str)  # a peer that is none of ours
    with pytest.raises(Breach, match="can't be printed"):
        feed(wire.FrameReader(), said.encode())


def test_a_head_that_promises_gigabytes_is_refused_before_they_come() -> None:
    reader = wire.FrameReader()
    with pytest.raises(Breach, match="a body of 4294967295 bytes"):
        feed(reader, wire._HEAD.pack(wire.Kind.REFILL, 0, 1, 2**32 - 1, 7))
    assert len(reader._buffer) == wire.HEAD_BYTES + wire.BODY_BYTES_MAX < 8192


def test_payloads_are_received_where_they_belong_and_nowhere_else() -> None:
    payloads = [secrets.token_bytes(5), secrets.token_bytes(9)]
    places = [bytearray(5), bytearray(9)]
    reader = wire.FrameReader()
    reader.expect([memoryview(place) for place in places])
    assert not reader.between_frames
    rest = b"".join(payloads) + wire.Count(3).encode()
    assert feed(reader, rest, [3, 4, 4]) == [wire.Count(3)]
    assert [bytes(place) for place in places] == payloads


def test_evicts_have_intact_headers_with_the_number_that_is_their_turn() -> None:
    column = seal.Column(b"k" * 16, b"t" * 16, 5)
    header = seal.pack(column, 64, 100, 0)
    assert wire.Evict(5, ((0, header),)).headers()[0].length == 100
    with pytest.raises(Breach, match="evict 6 is not sealed"):
        wire.Evict(6, ((0, header),)).headers()
    with pytest.raises(Breach, match="evict 5 is not sealed"):
        wire.Evict(5, ((0, bytes(64)),)).headers()
