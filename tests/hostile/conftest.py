"""One whole stack for all that attack it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.hostile.driver import EvilDriver
from tests.hostile.moves import MOVER
from tests.hostile.scene import Scene, scene

LAST = ("hostile/test_credentials", "hostile/test_documents")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Those with the evil driver go last: the battle has the same one in a process of its own."""
    items.sort(key=lambda item: any(name in item.nodeid for name in LAST))


@pytest.fixture(scope="session")
def evil_driver(stage: Scene) -> Iterator[EvilDriver]:
    """One that has a job of its own on the good node, and so was told a document."""
    with EvilDriver(stage.console, MOVER, stage.directory) as evil:
        stage.give_a_job(evil)
        yield evil


@pytest.fixture(scope="session")
def stage() -> Iterator[Scene]:
    with scene() as made:
        yield made
