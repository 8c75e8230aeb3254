"""Where the curve of an org's hit rate bends: the page marks it and takes it over, the API says it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from django.test import Client
from django.utils import timezone

from console.accounts.models import User
from console.policies.preview import curves, estimates
from console.policies.preview.estimates import Foretold, Known
from swdriver_shim.cache.reuse.preview import Confidence, Effect, Point, Preview, sweet_spot
from tests.conftest import People
from tests.html import compact

GIB = 1 << 30
BENT = tuple(
    Point(size * GIB, rate) for size, rate in ((1, 0.1), (2, 0.3), (4, 0.55), (8, 0.6), (16, 0.62))
)
STRAIGHT = tuple(Point(size * GIB, 0.02 * size) for size in (1, 2, 4, 8, 16))
FLAT = tuple(Point(size * GIB, 0.4) for size in (1, 2, 4, 8, 16))


def test_it_is_where_the_curve_bends_most() -> None:
    found = sweet_spot(BENT)
    assert found
    assert (found.at, found.hit_rate) == (4 * GIB, 0.55)


@pytest.mark.parametrize("points", [(), BENT[:2], STRAIGHT, FLAT])
def test_a_curve_that_does_not_bend_has_none(points: Sequence[Point]) -> None:
    assert sweet_spot(points) is None


def test_the_curve_shows_it_with_what_a_gib_pays() -> None:
    curve = curves.by_memory(BENT, 8 * GIB, 8 * GIB)
    assert curve
    assert curve.sweet
    sweet = curve.sweet
    assert (sweet.size, sweet.field) == ("4 GiB", "dram_bytes_max")
    assert (sweet.first, sweet.last) == ("1 GiB", "16 GiB")
    assert [sweet.before, sweet.beyond] == pytest.approx([0.45, 0.07])
    assert [is_sweet for _, _, is_sweet in curve.rows] == [False, False, True, False, False]
    assert (sweet.x, sweet.y) in curve.dots
    times = curves.by_time(
        tuple(Point(at, rate) for at, rate in ((60, 0.1), (300, 0.5), (900, 0.5))), 60, 60
    )
    assert times
    assert times.sweet is None, "a longer time costs no fixed bytes"


def foretold(by_tier2: tuple[Point, ...] = ()) -> Foretold:
    effect = Effect(hit_rate=0.6, tier2_hit_rate=0.0, bytes=8 * GIB, error=0.01)
    seen = Confidence(requests=9, references=9, share=1.0, reaches_back_seconds=60, idle_seconds=1)
    found = Preview(
        now=effect,
        proposed=effect,
        measured_hit_rate=0.6,
        freed_bytes=0,
        expiring_columns=0,
        expiring_bytes=0,
        by_ttl=(),
        by_bytes=BENT,
        by_tier2_bytes=by_tier2,
        confidence=seen,
    )
    return Foretold(found, Known(timezone.now(), (), 1, 1, 0), 1)


@pytest.mark.django_db
def test_one_click_takes_it_over_and_saves_nothing(
    people: People, browser_of: Callable[[User], Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(estimates, "foretell", lambda *_: foretold(by_tier2=BENT))
    browser = browser_of(people.org_admin)
    page = compact(browser.get("/orgs/acme/policy/"))
    assert "Sweet spot: <strong>4 GiB</strong>" in page
    assert "Hit rate by tier 2" in page
    assert "From 1 GiB to there the hit rate rises by 45" in page
    assert "Use 4 GiB for tier 2" in page
    assert 'value="tier2_bytes_max=4 GiB"' in page
    form = {"version": 0, "ttl_last_use_seconds": "10 min", "tiers": "dram", "share": 1, "priority": 50}
    form |= {"displacement": "default", "model": "", "reason": ""}
    look = {"look": "dram_bytes_max=4 GiB"}
    answered = compact(browser.post("/orgs/acme/policy/", form | look))
    assert 'name="dram_bytes_max" value="4 GiB"' in answered
    assert 'value="10 min"' in answered, "what else was written stays"
    stranger = compact(browser.post("/orgs/acme/policy/", form | {"look": "share=9"}))
    assert 'name="share" value="1"' in stranger
    assert not people.acme.policy_versions.exists()


def test_an_org_without_tier_2_has_no_mark_there_now() -> None:
    proposed = 4 * GIB
    curve = curves.by_tier2(BENT, None, proposed, is_used_now=False)
    assert curve
    assert [mark.name for mark in curve.marks] == ["then"]
    curve = curves.by_tier2(BENT, None, proposed, is_used_now=True)
    assert curve
    assert [mark.name for mark in curve.marks] == ["now", "then"]


@pytest.mark.django_db
def test_the_api_says_it(
    people: People, api_of: Callable[[User], Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(estimates, "foretell", lambda *_: foretold())
    answer = api_of(people.org_admin).post(
        "/api/v1/orgs/acme/policy:preview", {"policy": {}}, content_type="application/json"
    )
    assert answer.status_code == 200, answer.content
    assert answer.json()["sweet_spot"] == {"dram_bytes": 4 * GIB, "tier2_bytes": None}
    assert answer.json()["by_tier2_bytes"] == []
