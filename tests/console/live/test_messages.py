"""What viewers say is a message, or a sentence why it is none; never the end of a connection."""

from __future__ import annotations

import pytest

from console.live.messages import MESSAGE_BYTES_MAX, NotUnderstood, Subscribe, read


def test_a_message() -> None:
    assert read('{"type": "subscribe", "topic": "org:acme", "since": 3}') == Subscribe("org:acme", 3)


@pytest.mark.parametrize(
    "text",
    [
        "[" * 4000,
        '{"type": "subscribe", "topic": ' + "[" * 4000,
        '{"a":' * 800,
        '{"a": ' + "[" * 4000,  # looking for its type, the parser skips this
        '{"type": "subscribe", "topic": "org:acme", "since": ' + "9" * 3900 + "}",
        '{"type": "subscribe", "topic": "org:acme", "since": 1e999}',
        '{"type": "' + "x" * 4000 + '"}',
        "\ud800",
        "",
        "x" * (MESSAGE_BYTES_MAX + 1),
        None,
    ],
    ids=lambda text: str(text)[:20],
)
def test_whatever_it_is(text: str | None) -> None:
    with pytest.raises(NotUnderstood) as caught:
        read(text)
    assert len(str(caught.value)) < 400
