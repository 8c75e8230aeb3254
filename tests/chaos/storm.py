"""Processes are killed under load for some time, and what became of every promise is judged."""

from __future__ import annotations

import contextlib
import time
from functools import partial
from typing import Final

from tests.chaos.killer import Killer
from tests.chaos.leaders import WERE_EVALUATED, Leaders
from tests.chaos.loads import Loads
from tests.chaos.outages import outages
from tests.chaos.scene import WORKLOAD, Chaos
from tests.chaos.threads import came_true
from tests.chaos.verdict import Result, Seen, judge, missing_records
from tests.chaos.viewers import Viewer
from tests.console.workloads.whole import ORG
from tests.live import wait_until

TOPICS: Final = ("fleet", f"org:{ORG}")
AFTER_SECONDS_MAX: Final = 90.0
LAST_EVENT: Final = "SELECT coalesce(max(id), 0) FROM telemetry_event"


def rage(scene: Chaos, seconds: float, seed: int) -> Result:
    instances = frozenset(one["name"] for one in scene.instances(WORKLOAD))
    starts = scene.starts()
    with contextlib.ExitStack() as stack:
        viewers = [stack.enter_context(Viewer(web, scene.admin_token, TOPICS)) for web in scene.webs]
        for viewer in viewers:
            wait_until("it watches", partial(viewer.has, 1), AFTER_SECONDS_MAX)
        wait_until("rules are evaluated", partial(scene.rows, WERE_EVALUATED), AFTER_SECONDS_MAX)
        began = time.monotonic()
        with (
            Leaders(scene) as leaders,
            outages(scene) as alerts,
            Loads(scene) as loads,
            Killer(scene.victims, seed) as killer,
        ):
            time.sleep(seconds)  # it has a length; nothing is waited for
        [[last]] = scene.rows(LAST_EVENT)
        for viewer in viewers:
            came_true(partial(viewer.has, last), AFTER_SECONDS_MAX)
    came_true(partial(scene.is_ready, WORKLOAD), AFTER_SECONDS_MAX)
    came_true(lambda: not missing_records(scene), AFTER_SECONDS_MAX)
    seen = Seen(began, killer, loads, viewers, alerts, leaders, instances, starts)
    return judge(scene, seed, seen)
