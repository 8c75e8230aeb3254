"""What people read and type: sentences, times, sizes, curves. All of it pure."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from console.policies import sentences
from console.policies.documents import FIELDS
from console.policies.pages import forms
from console.policies.presets import PRESETS
from console.policies.preview import curves
from swdriver_shim.cache.reuse.preview import Point
from swdriver_shim.policy import Policy, Tiers


@pytest.mark.parametrize(
    ("policy", "sentence"),
    [
        (
            Policy(ttl_last_use_seconds=600, ttl_first_use_seconds=7200),
            (
                "Prompts are stored in memory only for 10 min after their last use, "
                "and at most 2 h in total."
            ),
        ),
        (
            Policy(ttl_last_use_seconds=None, ttl_first_use_seconds=90, scrub=True),
            (
                "Prompts are stored in memory only for 1 min 30 s after they "
                "were first stored, regardless of use. Deleted columns are overwritten."
            ),
        ),
        (
            Policy(ttl_last_use_seconds=None, tiers=Tiers.TIER2, dram_bytes_max=64 << 30),
            (
                "Prompts are stored in memory and in tier 2 until space is needed. They use at "
                "most 64 GiB of memory per driver."
            ),
        ),
        (
            Policy(tiers=Tiers.TIER2, encrypt_tier2=True, tier2_bytes_max=3 << 29),
            (
                "Prompts are stored in memory and in encrypted tier 2 for 1 h after their last use. "
                "They use at most 1.5 GiB of tier 2."
            ),
        ),
        (
            Policy(store_tokens_max=2048),
            (
                "Prompts are stored in memory only for 1 h after their last use. "
                "Only the first 2,048 tokens of each prompt are stored."
            ),
        ),
        (
            Policy(tiers=Tiers.TIER2, redundant_from_priority=50),
            (
                "Prompts are stored in memory and in tier 2 for 1 h after their last use. "
                "Those of priority 50 or more are stored redundantly in tier 2, where the rules of "
                "sessions have it."
            ),
        ),
        (
            Policy(tiers=Tiers.TIER2, redundant_from_priority=0),
            (
                "Prompts are stored in memory and in tier 2 for 1 h after their last use. "
                "All of them are stored redundantly in tier 2, where the rules of sessions have it."
            ),
        ),
        (
            Policy(tiers=Tiers.TIER2, tier2_bytes_max=0, redundant_from_priority=0),
            (
                "Prompts are stored in memory and in tier 2 for 1 h after their last use. "
                "They use at most 0 B of tier 2."
            ),
        ),
        (
            Policy(tiers=Tiers.DRAM, redundant_from_priority=50),
            "Prompts are stored in memory only for 1 h after their last use.",
        ),
        (Policy(tiers=Tiers.NONE), "Prompts are not stored: every prompt is recomputed."),
    ],
)
def test_a_policy_in_words(policy: Policy, sentence: str) -> None:
    assert sentences.sentence(policy) == sentence


def test_every_field_has_a_name_and_every_difference_is_told() -> None:
    assert set(sentences.LABELS) == set(FIELDS)
    before, after = Policy(), Policy(dram_bytes_max=1 << 40, priority=10, tiers=Tiers.NONE)
    assert sentences.differences(before, after) == [
        ("Storage tiers", "memory only", "none: nothing is stored"),
        ("Memory limit", "no limit", "1 TiB"),
        ("Priority", "35", "10"),
    ]
    assert sentences.differences(Policy(), Policy(store_tokens_max=2048)) == [
        ("Stored tokens per prompt", "no limit", "the first 2,048")
    ]
    assert sentences.differences(Policy(), Policy(redundant_from_priority=0)) == [
        ("Redundant in tier 2 from priority", "none", "0")
    ]
    close = Policy(dram_bytes_max=1 << 40), Policy(dram_bytes_max=(1 << 40) + 1)
    assert sentences.differences(*close) == [("Memory limit", "1 TiB", "1099511627777 B")]


def test_templates_have_names_that_say_what_they_do() -> None:
    assert list(PRESETS) == ["strict", "balanced", "long-lived", "not stored"]
    assert sentences.sentence(PRESETS["strict"].policy).startswith("Prompts are stored in memory only")


def test_a_curve_has_a_table_and_marks_where_the_policy_stands() -> None:
    points = [Point(60, 0.31), Point(600, 0.42), Point(3600, 0.47)]
    curve = curves.by_time(points, now=3600, proposed=600)
    assert curve is not None
    assert curve.rows == [("1 min", 0.31, False), ("10 min", 0.42, False), ("1 h", 0.47, False)]
    assert [tick.text for tick in curve.y_ticks] == ["30 %", "40 %", "50 %"]
    assert [mark.name for mark in curve.marks] == ["now", "then"]
    assert curve.marks[0].x == curve.dots[-1][0]
    assert curve.marks[1].x == curve.dots[1][0]
    assert curves.by_time(points[:1], now=1, proposed=2) is None
    beyond = curves.by_time(points, now=1, proposed=7200)
    assert beyond is not None
    assert [mark.text for mark in beyond.marks] == ["← now: 1 s", "then: 2 h →"]


@given(
    rates=st.lists(st.floats(0, 1), min_size=2, max_size=7),
    now=st.none() | st.integers(0, 1 << 40),
    then=st.none() | st.integers(0, 1 << 40),
)
def test_a_curve_stays_in_its_box(rates: list[float], now: int | None, then: int | None) -> None:
    points = [Point(60 * 2**at, rate) for at, rate in enumerate(rates)]
    curve = curves.by_memory(points, now, then)
    assert curve is not None
    across = [x for x, _ in curve.dots] + [mark.x for mark in curve.marks]
    assert all(curve.left <= x <= curve.right for x in across)
    assert all(curve.top <= y <= curve.bottom for _, y in curve.dots)


@pytest.mark.parametrize(
    ("field", "amount"), [("dram_bytes_max", 65_536_001), ("ttl_last_use_seconds", 100_003)]
)
def test_saving_a_form_as_it_was_opened_changes_no_number(field: str, amount: int) -> None:
    field_of_form = forms.PolicyForm.base_fields[field]
    assert field_of_form.clean(field_of_form.prepare_value(amount)) == amount
