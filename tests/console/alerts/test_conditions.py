"""What rules find in numbers. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

import pytest

from console.alerts.conditions.condition import Snapshot, WithoutHolders
from console.alerts.rules.catalogue import BY_SLUG, RULES, table
from console.alerts.rules.rule import Rule
from console.alerts.state.lifecycle import Verdict
from console.environment import PROJECT
from console.metrics.catalog import METRICS
from telemetry.histogram import BUCKETS, Histogram
from telemetry.queries import FOLDS
from tests.console.alerts.numbers import at, judged, line, world

BREACH, FINE = Verdict.BREACH, Verdict.OK


def heat(fast: int = 0, slow: int = 0) -> list[int]:
    """So many of 1 ms, and of 2 s."""
    made = Histogram()
    made.record(0.001, fast)
    made.record(2.0, slow)
    return made.counts


def latency(recent: Sequence[object], long: Sequence[object], **thresholds: float) -> list[Verdict]:
    tables = {"hour": [line("org:acme", *recent)], "six_hours": [line("org:acme", *long)]}
    return [one.verdict for one in judged(BY_SLUG["refill-slow"], tables, thresholds=thresholds)]


GOOD, BAD = heat(fast=100), heat(fast=50, slow=50)


@pytest.mark.parametrize(
    ("recent", "long", "verdicts"),
    [
        ([GOOD] * 60, [GOOD] * 72, [FINE]),
        ([BAD] * 60, [GOOD] * 72, [BREACH]),  # half of them, for an hour and now
        ([BAD] * 50 + [GOOD] * 10, [GOOD] * 72, [FINE]),  # it was so, and is over
        ([GOOD] * 59 + [BAD], [GOOD] * 72, [FINE]),  # a minute of it does not matter
        ([GOOD] * 30 + [heat(fast=80, slow=20)] * 30, [heat(fast=85, slow=15)] * 72, [BREACH]),
        ([heat(fast=92, slow=8)] * 60, [heat(fast=92, slow=8)] * 72, [BREACH]),  # slowly, for six hours
        ([heat(fast=96, slow=4)] * 60, [heat(fast=96, slow=4)] * 72, [FINE]),
        ([None] * 59 + [heat(slow=20)], [GOOD] * 72, []),  # too few to say anything
        ([None] * 60, [None] * 72, []),
    ],
)
def test_latency_is_a_budget_and_fires_when_it_burns(
    recent: Sequence[object], long: Sequence[object], verdicts: list[Verdict]
) -> None:
    assert latency(recent, long) == verdicts


@pytest.mark.parametrize(
    ("recent", "long", "window"),
    [
        ([BAD] * 60, [GOOD] * 72, "5 min"),
        ([BAD] * 50 + [GOOD] * 10, [BAD] * 72, "30 min"),  # fast for ten minutes
        ([BAD] * 50 + [None] * 10, [BAD] * 72, "30 min"),  # and nothing at all
    ],
)
def test_the_latency_of_an_alert_is_that_of_the_window_that_fires(
    recent: Sequence[object], long: Sequence[object], window: str
) -> None:
    tables = {"hour": [line("org:acme", *recent)], "six_hours": [line("org:acme", *long)]}
    [found] = judged(BY_SLUG["refill-slow"], tables)
    assert found.verdict == BREACH
    assert (found.value or 0) > (found.threshold or 0) > 0
    assert found.sentence.startswith(f"refill p99 of acme over {window} is ")


def test_an_org_may_promise_more_or_less() -> None:
    slow = [heat(fast=90, slow=10)] * 60
    assert latency(slow, slow) == [BREACH]
    assert latency(slow, slow, objective_seconds=10) == [FINE]
    assert latency(slow, slow, objective_share=0.9) == [FINE]
    assert latency(slow, slow, least_requests=1e9) == []


@pytest.mark.parametrize(
    ("hit", "asked", "usual", "verdict"),
    [
        (20_000, 100_000, [0.8] * 24, BREACH),
        (60_000, 100_000, [0.8] * 24, FINE),
        (0, 100_000, [0.01] * 24 + [None] * 50, BREACH),
        (0, 100_000, [0.8] * 5 + [None] * 100, None),  # too short a past
        (0, 9_000, [0.8] * 24, None),  # too little traffic
        (50_000, 100_000, [0.6] * 20 + [0.05] * 4, FINE),  # the usual is the median
    ],
)
def test_a_hit_rate_is_held_against_its_own_past(
    hit: int, asked: int, usual: list[float | None], verdict: Verdict | None
) -> None:
    tables = {
        "hit": [line("org:acme", hit / 2, None, hit / 2)],
        "requested": [line("org:acme", asked)],
        "usual": [line("org:acme", *usual)],
    }
    assert [one.verdict for one in judged(BY_SLUG["hit-rate-drop"], tables)] == (
        [verdict] if verdict else []
    )


def test_an_org_without_tokens_has_no_hit_rate_whatever_its_thresholds() -> None:
    tables = {
        "hit": [line("org:acme", None)],
        "requested": [line("org:acme", 0)],
        "usual": [line("org:acme", *[0.8] * 9)],
    }
    thresholds = {"least_tokens": 0, "least_hours": 1}
    assert judged(BY_SLUG["hit-rate-drop"], tables, thresholds=thresholds) == []


def test_a_level_is_judged_of_each_shard() -> None:
    waiting = [line("node:ax-7", 5000, 3, shard="a"), line("node:ax-7", None, 1001, shard="b")]
    found = judged(BY_SLUG["queue-deep"], {"waiting": waiting})
    assert [(dict(one.labels), one.verdict) for one in found] == [
        ({"shard": "a"}, FINE),
        ({"shard": "b"}, BREACH),
    ]
    assert found[1].sentence == "1,001 requests waiting at shard b of ax-7"


def test_columns_that_wait_in_front_are_told_while_the_oldest_waits_too_long() -> None:
    waits = [line("node:ax-7", 40, 901), line("node:ax-8", 9000, 900), line("node:ax-9", None)]
    found = judged(BY_SLUG["tier2-front-waiting"], {"waiting": waits})
    assert [(one.topic, one.verdict) for one in found] == [("node:ax-7", BREACH), ("node:ax-8", FINE)]
    assert found[0].sentence == "a column has waited for 901 s in front of tier 2 of ax-7"


def test_redundancy_is_degraded_by_agents_that_are_away_and_by_columns_that_lack_a_fragment() -> None:
    tables = {
        "unreachable": [line("node:ax-7", 0, shard=name) for name in "ab"]
        + [line("node:ax-7", 0, 2, shard="c")],
        "incomplete": [
            line("node:ax-7", 9, 0, shard="a"),
            line("node:ax-7", 0, 1204, shard="b"),
            line("node:ax-7", 0, 7, shard="c"),
        ],
    }
    found = {dict(one.labels)["shard"]: one for one in judged(BY_SLUG["redundancy-degraded"], tables)}
    assert {name: one.verdict for name, one in found.items()} == {"a": FINE, "b": BREACH, "c": BREACH}
    assert found["b"].sentence == "1,204 columns of b on ax-7 lack a fragment"
    assert found["c"].sentence == "ax-7 can't reach 2 agents with fragments of c"
    one = {
        "unreachable": [line("node:ax-7", 1, shard="a")],
        "incomplete": [line("node:ax-7", 1, shard="b")],
    }
    assert [finding.sentence for finding in judged(BY_SLUG["redundancy-degraded"], one)] == [
        "ax-7 can't reach 1 agent with fragments of a",
        "1 column of b on ax-7 lacks a fragment",
    ]


def test_redundancy_is_not_kept_without_holders_and_where_columns_are_stored_alone() -> None:
    rule = BY_SLUG["redundancy-not-kept"]
    alone = {
        "alone": [
            line("node:ax-7", 0, 1, why="failed"),
            line("node:ax-7", 0, 29, 1, why="over_budget"),
            line("node:ax-7", 0, why="full"),
            line("node:ax-8", 0, None, 0, why="full"),
        ]
    }
    now = replace(world(), redundant_nodes=frozenset({"ax-7", "ax-8"}))
    assert [(dict(one.labels), one.verdict) for one in judged(rule, alone, now)] == [
        ({"node": "ax-7"}, BREACH),
        ({"node": "ax-8"}, FINE),
    ]
    off = judged(rule, alone, replace(now, redundant_nodes=frozenset()))
    assert [one.verdict for one in off] == [Verdict.GONE] * 2, "the rules ask for none any more"
    assert judged(rule, alone, now)[0].sentence == (
        "ax-7 stored 31 columns on its own disk alone within 5 minutes, without redundancy: "
        "links had no room in time (30), other agents failed or could not be reached (1)"
    )
    one = judged(rule, {"alone": [line("node:ax-7", 1, why="full")]})[0].sentence
    assert one.startswith("ax-7 stored 1 column on its own disk alone within 5 minutes")
    few = WithoutHolders("4+2", "", 128, "4+2 needs 6 agents with tier 2 on a disk of their own.")
    [found] = judged(rule, {"alone": []}, Snapshot(at=at(0), without_holders=(few,)))
    assert (found.topic, dict(found.labels), found.verdict) == ("fleet", {"redundancy": "4+2"}, BREACH)
    assert found.sentence == (
        "128 shards are stored without redundancy: 4+2 needs 6 agents with tier 2 on a disk of their own"
    )
    less = replace(few, instead="2+1")
    [found] = judged(rule, {"alone": []}, Snapshot(at=at(0), without_holders=(less,)))
    assert dict(found.labels) == {"redundancy": "4+2", "instead": "2+1"}
    assert found.sentence.startswith("128 shards are stored with 2+1 instead of 4+2: 4+2 needs")


def test_tier_2_is_held_against_its_cap_and_without_a_cap_nothing_is_said() -> None:
    def full(held: float, cap: list[float]) -> list[Verdict]:
        tables = {"held": [line("node:ax-7", held)], "cap": [line("node:ax-7", *cap)] if cap else []}
        return [one.verdict for one in judged(BY_SLUG["tier2-near-cap"], tables)]

    assert full(96, [100]) == [BREACH]
    assert full(95, [100]) == [FINE]
    assert full(95, [0]) == []
    assert full(95, []) == []


def test_shares_read_as_in_figures() -> None:
    tables = {"held": [line("node:ax-7", 96.24)], "cap": [line("node:ax-7", 100)]}
    [found] = judged(BY_SLUG["tier2-near-cap"], tables)
    assert found.sentence == "tier 2 of ax-7 is 96.2 % full (threshold 95 %)"
    tables = {
        "hit": [line("org:acme", 20_000)],
        "requested": [line("org:acme", 100_000)],
        "usual": [line("org:acme", *[0.805] * 24)],
    }
    [found] = judged(BY_SLUG["hit-rate-drop"], tables)
    assert found.sentence == "hit rate of acme is 20 % (usually 80.5 %)"


def test_what_is_not_ready_or_behind_is_found() -> None:
    ready = {"ready": [line("node:a", 0, None, 0), line("node:b", 0, 1), line("node:c", None)]}
    assert [one.verdict for one in judged(BY_SLUG["agent-not-ready"], ready)] == [BREACH, FINE]
    generations = {
        "desired": [line("node:a", 7, 8), line("node:b", 8), line("node:c", 8)],
        "observed": [line("node:a", 7, 7), line("node:b", 8)],
    }
    found = judged(BY_SLUG["desired-not-applied"], generations)
    assert [(one.topic, one.verdict) for one in found] == [("node:a", BREACH), ("node:b", FINE)]


def test_a_single_column_beyond_its_time_is_a_breach() -> None:
    overstay = BY_SLUG["ttl-exceeded"]
    assert [one.verdict for one in judged(overstay, {"columns": [line("driver:j", 0, 1, None)]})] == [
        BREACH
    ]
    assert [one.verdict for one in judged(overstay, {"columns": [line("driver:j", 0, 0)]})] == [FINE]


# Silence


def silent(now: Snapshot) -> dict[str, Verdict]:
    return {one.topic: one.verdict for one in judged(BY_SLUG["agent-not-reporting"], {}, now)}


def test_who_is_silent_while_others_are_heard_is_found_however_long_it_is() -> None:
    now = world(100, ax_1=99, ax_2=60, ax_3=-80_000)
    assert silent(now) == {"node:ax-1": FINE, "node:ax-2": BREACH, "node:ax-3": BREACH}


def test_while_nothing_arrives_it_is_the_numbers_and_not_the_agents() -> None:
    now = world(1000, ax_1=10, ax_2=9)
    assert set(silent(now).values()) == {FINE}
    [late] = judged(BY_SLUG["telemetry-late"], {}, now)
    assert (late.verdict, late.value) == (BREACH, 990)
    [well] = judged(BY_SLUG["telemetry-late"], {}, world(20, ax_1=10))
    assert well.verdict is FINE


def test_while_nobody_received_anything_nobody_was_silent() -> None:
    """All is stopped and started again: some report before others."""
    now = replace(world(100, ax_1=99, ax_2=50), not_received=(at(55), at(80)))
    assert silent(now) == {"node:ax-1": FINE, "node:ax-2": FINE}
    assert silent(replace(now, not_received=(at(40), at(80)))) == silent(now)
    for other in ((at(65), at(80)), (at(20), at(40))):
        assert silent(replace(now, not_received=other)) == {"node:ax-1": FINE, "node:ax-2": BREACH}


def test_who_was_silent_before_stays_silent_when_ingest_is_started_again() -> None:
    now = replace(world(100, ax_1=99, ax_2=-80_000), not_received=(at(85), at(95)))
    assert silent(now) == {"node:ax-1": FINE, "node:ax-2": BREACH}


def test_who_has_joined_and_sends_no_telemetry_is_silent_once_there_was_time_to() -> None:
    joined = {"node:ax-1": at(0), "node:ax-2": at(0), "node:ax-3": at(50)}
    now = Snapshot(at=at(60), last_seen={"node:ax-1": at(59)}, joined=joined)
    assert silent(now) == {"node:ax-1": FINE, "node:ax-2": BREACH, "node:ax-3": FINE}
    found = {one.topic: one for one in judged(BY_SLUG["agent-not-reporting"], {}, now)}
    assert "KVSS_AGENT_TELEMETRY" in found["node:ax-2"].sentence


def test_who_joins_by_a_name_that_was_silent_has_time_to_report() -> None:
    now = replace(world(100, ax_1=99, ax_2=-1000), joined={"node:ax-2": at(95)})
    assert silent(now) == {"node:ax-1": FINE, "node:ax-2": FINE}
    assert silent(replace(now, joined={"node:ax-2": at(-900)})) == {
        "node:ax-1": FINE,
        "node:ax-2": BREACH,
    }


def test_a_leaf_is_down_when_all_of_its_nodes_are_silent() -> None:
    leaves = {"node:ax-1": ("leaf-1",), "node:ax-2": ("leaf-1", "leaf-2"), "node:ax-3": ("leaf-2",)}

    def down(**heard: float) -> dict[str, Verdict]:
        known = world(100, web=100, **heard)
        now = Snapshot(at=known.at, last_seen=known.last_seen, leaves=leaves)
        return {one.topic: one.verdict for one in judged(BY_SLUG["leaf-down"], {}, now)}

    assert down(ax_1=1, ax_2=1, ax_3=99) == {"leaf:leaf-1": BREACH, "leaf:leaf-2": FINE}
    assert down(ax_1=99, ax_2=1, ax_3=99) == {"leaf:leaf-1": FINE, "leaf:leaf-2": FINE}
    assert down(ax_2=1) == {"leaf:leaf-1": FINE, "leaf:leaf-2": FINE}, "the others never joined"
    assert down() == {}


# The catalogue itself


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.slug)
def test_a_rule_reads_what_there_is_and_has_its_page(rule: Rule) -> None:
    for reading in rule.queries.values():
        metric = METRICS[reading.metric]
        assert reading.fold in FOLDS[metric.kind]
        assert {*reading.by, *reading.where} <= set(metric.labels)
        assert reading.step % 10 == 0
        assert not reading.over or reading.over in METRICS
    assert (PROJECT / "docs" / "runbooks" / rule.runbook).is_file()
    runbooks = (PROJECT / "docs" / "runbooks" / "README.md").read_text()
    told = ", ".join(rule.prometheus)
    assert f"| {rule.slug} | {told}" in runbooks
    assert f"[{rule.runbook}]({rule.runbook})" in runbooks
    for limit in rule.thresholds:
        assert limit.low <= limit.default <= limit.high


def test_prometheus_has_the_same_rules() -> None:
    """Each of its alerts is one of the console's, but for those that tell of the console."""
    text = (PROJECT / "deploy" / "prometheus" / "tidegate.rules.yaml").read_text()
    there = re.findall(r"- alert: (\w+)", text)
    named = [name for rule in RULES for name in rule.prometheus]
    assert len(set(named)) == len(named)
    assert set(there) == {*named, "TidegateAlertsLate", "TidegateNotificationsWaiting"}
    for rule in RULES:
        for name in rule.prometheus:
            block = text.split(f"- alert: {name}\n")[1].split("- alert:")[0]
            assert f"severity: {rule.severity}" in block, name
            assert f"runbook: docs/runbooks/{rule.runbook}" in block, name


@pytest.mark.parametrize("count", [1, 2])
def test_the_first_of_what_should_never_be_is_one(count: int) -> None:
    s = "" if count == 1 else "s"
    expected = {
        "tier2-faults": ("faults", f"{count} tier 2 error{s} on ax-7: no-space"),
        "ttl-exceeded": ("columns", f"ax-7 kept {count} column{s} in memory past the TTL"),
        "seal-refused": ("tokens", f"{count} token{s} of ax-7 failed the seal check"),
        "siblings-away": ("away", f"siblings of ax-7 were away for {count} prompt{s}"),
    }
    for slug, (query, sentence) in expected.items():
        tables = {query: [line("node:ax-7", count, outcome="no-space")]}
        [found] = judged(BY_SLUG[slug], tables)
        assert found.sentence == sentence


def test_all_rules_are_documented() -> None:
    assert table() in (PROJECT / "docs" / "alert-rules.md").read_text()


def test_no_two_rules_have_the_same_name_and_buckets_are_those_of_telemetry() -> None:
    assert len(BY_SLUG) == len(RULES)
    assert len(heat()) == BUCKETS
