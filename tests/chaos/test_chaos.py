"""Two of every process under load, killed one after the other in random order: nothing is lost, nothing
happens twice, and nobody fails but those who asked the killed one.

`make chaos SECONDS=600` does it for long.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path

import pytest

from tests.chaos.scene import chaos
from tests.chaos.storm import rage

pytestmark = [pytest.mark.stack, pytest.mark.slow, pytest.mark.timeout(1200)]

SECONDS = float(os.environ.get("CHAOS_SECONDS", "40"))
SEED = int(os.environ.get("CHAOS_SEED") or secrets.randbelow(1 << 31))


def test_whatever_is_killed_nothing_is_lost_and_nothing_happens_twice(tmp_path: Path) -> None:
    with chaos(tmp_path) as scene:
        result = rage(scene, SECONDS, SEED)
    print(result.table())
    assert result.broken == [], result.table()
    assert result.kills.total() >= SECONDS / 10
