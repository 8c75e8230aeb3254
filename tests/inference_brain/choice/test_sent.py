"""What was sent counts as stored for a while, before any map says so."""

from __future__ import annotations

import pytest

from inference_brain.choice import SentPrefixes


def keys(*chunks: int) -> list[bytes]:
    """Eight columns for each, which depend on all before them."""
    return [
        repr((chunks[: at + 1], column)).encode() for at in range(len(chunks)) for column in range(8)
    ]


def test_prefixes_are_found_where_they_were_sent_and_for_how_long() -> None:
    sent = SentPrefixes()
    sent.add("r1", keys(1, 2, 3), until=10.0)
    sent.add("r2", keys(1, 9), until=20.0)
    asked = keys(1, 2, 4)
    assert sent.hits(asked, 5.0) == {"r1": 1024, "r2": 512}
    assert sent.hits(asked, 15.0) == {"r2": 512}
    assert sent.hits(asked, 25.0) == {}
    assert sent.hits(keys(7), 5.0) == {}
    sent.clear()
    assert sent.hits(asked, 5.0) == {}


def test_what_was_sent_again_counts_for_longer_and_what_failed_not_at_all() -> None:
    sent = SentPrefixes()
    sent.add("r1", keys(1, 2), until=10.0)
    sent.add("r1", keys(1), until=20.0)
    sent.add("r1", keys(1), until=5.0)
    assert sent.hits(keys(1, 2), 15.0) == {"r1": 512}
    sent.drop("r1", keys(1, 2))
    assert sent.hits(keys(1, 2), 1.0) == {}
    assert len(sent) == 0


def test_it_is_bounded() -> None:
    sent = SentPrefixes(keys_max=100)
    for number in range(1000):
        sent.add("r1", keys(number), until=10.0)
    assert len(sent) == 100
    assert sent.hits(keys(999), 0.0) == {"r1": 512}
    assert sent.hits(keys(1), 0.0) == {}
    with pytest.raises(ValueError, match="at least one"):
        SentPrefixes(keys_max=0)
