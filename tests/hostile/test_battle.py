"""All evil peers at once against a whole stack, for a few seconds: no promise breaks.

`make hostile MINUTES=…` does it for long, and there others' latency is judged too: here the machine runs
other tests beside it.
"""

from __future__ import annotations

import pytest

from tests.hostile.attacks import ATTACKS
from tests.hostile.battle import fight
from tests.hostile.driver import EvilDriver
from tests.hostile.figures import table
from tests.hostile.moves import MOVER
from tests.hostile.scene import Scene

pytestmark = [pytest.mark.stack, pytest.mark.xdist_group("hostile"), pytest.mark.timeout(900)]

CALM_SECONDS, ATTACK_SECONDS = 1.0, 8.0
PATIENCE = 6.0  # the machine runs other tests beside it
SEED = 7


def test_no_promise_breaks_while_all_evil_peers_are_at_work(stage: Scene) -> None:
    # Before evil nodes join: its session might be placed on one of them.
    with EvilDriver(stage.console, MOVER, stage.directory) as evil:
        stage.give_a_job(evil)
    result = fight(
        stage,
        ATTACKS,
        calm_seconds=CALM_SECONDS,
        seconds=ATTACK_SECONDS,
        seed=SEED,
        patience=PATIENCE,
    )
    print(table(result.figures))
    assert not result.broken, "\n".join(result.broken)
