"""What `benchmarks.proxy` says of the machine that it runs on."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks import proxies, proxy
from benchmarks.harness import Row
from benchmarks.proxies import Running
from benchmarks.proxy import Lengths

BOTH = Running("brain", 1), Running("direct", 2)


def rows(monkeypatch: pytest.MonkeyPatch, *, waited: dict[str, float]) -> dict[str, Row]:
    """Of rounds in which the brain has waited so many of ten seconds, at the peak and below it."""

    def play(target: Running, seconds: float, bodies: Any, **more: Any) -> dict[str, Any]:
        at = "paced" if "rate" in more else "peak"
        return {
            "rps": 100.0,
            "requests": 1000,
            "seconds": 10.0,
            "took": [0.001, 0.002],
            "cpu": 8.0 if target.name == "brain" else 1.0,
            "waited": waited[at] if target.name == "brain" else 0.0,
        }

    monkeypatch.setattr(proxy, "play", play)
    monkeypatch.setattr(proxy, "PROMPTS", {"2k": 20})
    monkeypatch.setattr(proxy, "load", lambda _: None)
    monkeypatch.setattr(proxy, "conversations", lambda *_: ["{}"])
    brain, direct = BOTH
    made = proxy.added(direct, brain, Path("unused"), Lengths(2, 1.0, 1.0, 1.0))
    return {row.id: row for row in made}


def test_a_row_says_how_long_the_brain_waited_at_the_peak_and_below_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    more = rows(monkeypatch, waited={"peak": 0.25, "paced": 0.01})["route.added.p99.2k"].more
    assert more["peak waited %"] == pytest.approx(2.5)
    assert more["waited %"] == pytest.approx(0.1)
    assert more["busy %"] == pytest.approx(80)


def test_where_the_system_does_not_say_who_waited_no_row_says_nobody_did(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told = Running("brain", 1, (psutil.Process(),)).waited_seconds()
    monkeypatch.setattr(proxies, "SCHEDULED", "/proc/{}/nothing")
    untold = Running("brain", 1, (psutil.Process(),)).waited_seconds()
    assert told >= 0
    more = rows(monkeypatch, waited={"peak": untold, "paced": untold})["route.added.p99.2k"].more
    assert "busy %" in more
    assert not {"waited %", "peak waited %"} & more.keys()


def test_who_may_not_run_in_real_time_is_told_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "sched_setscheduler", refused)
    monkeypatch.setattr(sys, "argv", ["proxy", "--real-time", "--part", "route"])
    with pytest.raises(SystemExit) as ended:
        proxy.main()
    assert ended.value.code == 2
    assert "--real-time needs root" in capsys.readouterr().err
