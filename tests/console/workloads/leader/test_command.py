"""How an orchestrator begins."""

from __future__ import annotations

import threading

import pytest

from console.placement import solvers
from console.workloads.management.commands import orchestrate


def test_while_it_loads_its_solvers_it_says_that_it_is_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    told, heard = [], threading.Event()

    def tell(what: str) -> None:
        told.append(what)
        heard.set()

    def load() -> None:
        assert heard.wait(60)

    monkeypatch.setattr(orchestrate, "WATCHDOG_SECONDS", 0.01)
    monkeypatch.setattr(orchestrate, "notify", tell)
    monkeypatch.setattr(solvers, "load", load)
    orchestrate._load_solvers()
    assert set(told) == {"WATCHDOG=1"}


def test_an_orchestrator_whose_solvers_cannot_be_loaded_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """And says why. It would lead otherwise, and fail at each plan."""

    def load() -> None:
        raise ImportError("no such library")

    monkeypatch.setattr(solvers, "load", load)
    with pytest.raises(ImportError, match="no such library"):
        orchestrate._load_solvers()
