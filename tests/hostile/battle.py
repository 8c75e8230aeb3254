"""A battle: a good tenant is timed in calm, then while attackers are busy with somebody else, then while
they attack, then what they left is judged.

    calm ▶ elsewhere ▶ attack (all peers at once) ▶ aftermath: roll-up, purge, receipt

What this machine's processors and caches lose to attackers, `elsewhere` shows: theirs are other
machines. The tenant and each attack are processes of their own; who watches is this one.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import psycopg

from tests.hostile import elsewhere, tenant
from tests.hostile.apart import Apart, Failed
from tests.hostile.figures import Figure, Over
from tests.hostile.ground import Attack, Deeds, work
from tests.hostile.health import Health
from tests.hostile.scene import DRIVER, NODE, ORGS, Scene
from tests.live import wait_until

MEBIBYTE: Final = 1 << 20
AFTERMATH_SECONDS_MAX: Final = 60.0
GROWTH_MIB_MAX: Final = 256  # of any process, at any moment of the attack
DESCRIPTORS_LEFT_MAX: Final = 64  # more than before, when it is over
ALERTS_AGE_SECONDS_MAX: Final = 30.0  # they are evaluated every ten seconds
RECONCILE_SECONDS_MAX: Final = 10.0
END_SECONDS_MAX: Final = 300.0  # from being told to end to the end of what an attack has begun
CALM, ELSEWHERE, ATTACKED = "calm", "elsewhere", "attacked"


@dataclass
class Result:
    """`broken`: the promises that did not hold, in sentences. `load_seconds`: of the tenant, by phase,
    the shortest first."""

    broken: list[str] = field(default_factory=list)
    figures: list[Figure] = field(default_factory=list)
    load_seconds: dict[str, list[float]] = field(default_factory=dict)

    def measured(
        self, name: str, value: float, unit: str, limit: float | None = None, over: Over = Over.WORST
    ) -> Figure:
        """Note a figure; one that does not hold is a promise that is broken."""
        figure = Figure(name, value, unit, limit, over)
        self.figures.append(figure)
        if not figure.holds:
            self.broken.append(f"{name} is {value:,.4g} {unit}, and may be {limit:,.4g} {unit}.")
        return figure


def fight(
    scene: Scene,
    attacks: Mapping[str, Attack],
    *,
    calm_seconds: float,
    elsewhere_seconds: float = 0.0,
    seconds: float,
    seed: int,
    yields: bool = False,
    patience: float = 1.0,
) -> Result:
    """`yields`: attackers take no processor time from stack and tenant, as if they had machines of their
    own. What the stack does because of them is not spared. `patience`: how many times as long as
    promised anything may take."""
    result, machines = Result(), scene.machines
    with contextlib.ExitStack() as stack:
        attackers = {
            name: stack.enter_context(
                Apart(
                    f"attack {name}",
                    partial(work, attack, scene, f"{seed} {name}"),
                    yields=yields,
                    processors=machines.others,
                )
            )
            for name, attack in attacks.items()
        }
        decoys = [
            stack.enter_context(
                Apart(f"decoy {number}", elsewhere.work, yields=yields, processors=machines.others)
            )
            for number in range(len(attacks) if elsewhere_seconds else 0)
        ]
        good = stack.enter_context(
            Apart(
                "tenant",
                partial(tenant.serve, scene),
                processors=machines.driver,
                is_first=machines.are_divided,
            )
        )
        with Health(scene) as health:
            good.begin()
            time.sleep(calm_seconds)  # all have a length; nothing is waited for
            calm_ended = time.monotonic()
            for decoy in decoys:
                decoy.begin()
            time.sleep(elsewhere_seconds)
            elsewhere_ended = time.monotonic()
            for decoy in decoys:
                decoy.end()
            for decoy in decoys:
                assert decoy.result(patience * END_SECONDS_MAX), "It sends something."
            began = time.monotonic()
            for one in attackers.values():
                one.begin()
            time.sleep(seconds)
            ended = time.monotonic()
            for one in attackers.values():
                one.end()
            deeds = _deeds(result, attackers, patience * END_SECONDS_MAX)
            good.end()
            report = good.result(patience * END_SECONDS_MAX)
        result.load_seconds = {
            CALM: report.load_seconds(0, calm_ended),
            ELSEWHERE: report.load_seconds(calm_ended, elsewhere_ended),
            ATTACKED: report.load_seconds(began, ended),
        }
        _judge_tenant(result, report, scene)
        _judge_health(result, health, patience)
        _judge_aftermath(result, scene, patience)
        _tell_deeds(result, deeds)
    return result


def _deeds(result: Result, attackers: Mapping[str, Apart[Deeds]], seconds_max: float) -> list[Deeds]:
    found = []
    for name, one in attackers.items():
        try:
            deeds = one.result(seconds_max)
        except Failed as error:
            result.broken.append(str(error))
            continue
        if not deeds.counts:
            result.broken.append(f"The attack “{name}” did nothing.")
        result.broken += deeds.broken
        found.append(deeds)
    return found


def _tell_deeds(result: Result, deeds: list[Deeds]) -> None:
    counts = sum((one.counts for one in deeds), Counter[str]())
    sent = sum((one.sent_bytes for one in deeds), Counter[str]())
    for name, count in sorted(counts.items()):
        result.measured(f"deeds.{name}", count, "", over=Over.SUM)
    for name, count in sorted(sent.items()):
        result.measured(f"sent.{name}", count / MEBIBYTE, "MiB", over=Over.SUM)


def _judge_tenant(result: Result, report: tenant.Report, scene: Scene) -> None:
    for phase, seconds in result.load_seconds.items():
        if phase == ELSEWHERE and not seconds:
            continue
        for short, share in (("p50", 0.5), ("p99", 0.99)):
            value = 1000 * tenant.percentile(seconds, share)
            result.measured(f"others.{phase}.{short}", value, "ms", over=Over.MEDIAN)
        result.measured(f"others.{phase}.loads", len(seconds), "", over=Over.SUM)
    result.measured("others.failed", len(report.failed), "requests", 0, Over.SUM)
    result.measured("others.wrong", len(report.wrong), "requests", 0, Over.SUM)
    result.measured("others.lost", report.lost_tokens, "tokens", 0, Over.SUM)
    for told in (report.failed, report.wrong, report.lost):
        result.broken += told[:1]
    if report.failed or report.lost:  # agent and driver say why, if they know
        result.broken += [line for name in (NODE, DRIVER) for line in scene.processes[name].warnings]
    if not result.load_seconds[ATTACKED]:
        result.broken.append("Another org got no answer during the attack.")


def _judge_health(result: Result, health: Health, patience: float) -> None:
    lag = max(health.reconcile_seconds, default=float("nan"))
    age = max(health.alert_age_seconds, default=float("nan"))
    result.measured("reconcile lag", lag, "s", patience * RECONCILE_SECONDS_MAX)
    result.measured("alert lag", age, "s", patience * ALERTS_AGE_SECONDS_MAX)
    for name, used in health.rss.items():
        grown = (used.most - used.first) / MEBIBYTE
        result.measured(f"memory.{name}", grown, "MiB more", GROWTH_MIB_MAX)
    for name, used in health.descriptors.items():
        left = used.last - used.first
        result.measured(f"descriptors.{name}", left, "more", DESCRIPTORS_LEFT_MAX)
    for name, count in health.new_tracebacks().items():
        result.broken.append(f"{name} has {count} tracebacks.")
    for name in health.restarted():
        result.broken.append(f"{name} had to be started again.")


def _judge_aftermath(result: Result, scene: Scene, patience: float) -> None:
    """What goes on, or comes back by itself, when the attackers are gone."""
    over = time.time()
    purge = _Purge(scene)
    for name, what, holds in (
        (
            "numbers",
            "numbers of a good driver are written",
            lambda: newest_numbers(scene, DRIVER) > over,
        ),
        ("roll-up", "numbers of before are rolled up", lambda: oldest_fresh(scene) > over - 10),
        ("purge", "a purge ends with its receipt", purge.is_done),
        ("service", "the org is served again", lambda: tenant.is_served(scene)),
    ):
        try:
            wait_until(what, holds, patience * AFTERMATH_SECONDS_MAX)
        except AssertionError as error:
            result.broken.append(f"After the attack: {error}. {purge.said}")
        result.measured(f"aftermath.{name}", time.time() - over, "s")


class _Purge:
    """Of the good org."""

    def __init__(self, scene: Scene) -> None:
        self.scene = scene
        self.said = ""
        self._operation = ""

    def is_done(self) -> bool:
        if not self._operation:
            key = {"Idempotency-Key": f"purge-{time.time_ns()}"}
            told = {"reason": "after the attack"}
            self._operation = str(self.scene.ask("POST", f"/orgs/{ORGS[0]}/purge", told, **key)["id"])
        found: dict[str, Any] = self.scene.ask("GET", f"/operations/{self._operation}")
        self.said = str(found["progress"]["message"])
        return bool(found["done"])


def newest_numbers(scene: Scene, driver: str) -> float:
    """When the last record of a driver was told that is written, in seconds since 1970."""
    query = "SELECT extract(epoch FROM max(seen_at)) FROM telemetry_source WHERE topic = %s"
    with psycopg.connect(scene.settings["DATABASE_URL"]) as connection:
        row = connection.execute(query, [f"driver:{driver}"]).fetchone()
    return float(row[0]) if row and row[0] else 0.0


def oldest_fresh(scene: Scene) -> float:
    """The oldest ten seconds that nobody has rolled up yet, in seconds since 1970."""
    with psycopg.connect(scene.settings["DATABASE_URL"]) as connection:
        row = connection.execute("SELECT min(bucket) FROM telemetry_fresh").fetchone()
    return float(row[0]) if row and row[0] else float("inf")
