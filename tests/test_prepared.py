"""What is prepared once a run takes none of the time of the test that happens to come first."""

from __future__ import annotations

import secrets
import signal

import pytest

from tests import prepared


def left() -> float:
    return signal.getitimer(signal.ITIMER_REAL)[0]


@pytest.mark.timeout(60)
def test_what_is_made_once_has_a_time_of_its_own() -> None:
    before, meanwhile = left(), list[float]()
    assert 0 < before < prepared.SECONDS_MAX / 2

    def make() -> str:
        meanwhile.append(left())
        return "made"

    assert prepared.once(secrets.token_hex(6), make) == "made"
    [its] = meanwhile
    assert its > prepared.SECONDS_MAX / 2
    assert 0 < left() <= before
