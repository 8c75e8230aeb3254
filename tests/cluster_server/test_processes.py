"""The backend `processes`: what disks, folders and clients that leave do to it."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from cluster_server.processes.folder import About, Folder
from cluster_server.proto import cluster_pb2 as pb
from tests.cluster_server.conformance.worlds import Processes
from tests.cluster_server.requests import job


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[Processes]:
    made = Processes(tmp_path, has_cgroups=False, spares=0)
    await made.open()
    yield made
    await made.close()


async def test_jobs_that_can_not_be_deleted_hold_up_no_others(
    world: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    remove = shutil.rmtree

    def refuse(path: Any, *arguments: Any, **options: Any) -> None:
        if Path(path).suffix == ".gone" and Path(path).exists():
            raise OSError(5, "Input/output error", str(path))
        remove(path, *arguments, **options)

    monkeypatch.setattr(shutil, "rmtree", refuse)
    for number in range(8):
        await world.backend.submit(job(f"job-{number}", result=number))

    def are_done() -> bool:
        found = {one.name: one.state for one in world.backend.jobs()}
        return len(found) <= 6 and set(found.values()) == {pb.JOB_SUCCEEDED} and "job-7" in found

    await world.until("all have run, and old ones are forgotten", are_done)


def test_a_folder_that_nobody_may_enter_is_deleted(tmp_path: Path) -> None:
    """For an ordinary user."""
    folder = Folder(tmp_path / "one")
    folder.make(About(), b"{}", {})
    outside = tmp_path / "outside"
    outside.mkdir(mode=0o500)
    inner = folder.path / "locked" / "inner"
    inner.mkdir(parents=True)
    (inner / "link").symlink_to(outside)
    inner.chmod(0)
    inner.parent.chmod(0)
    folder.remove()
    assert [one.name for one in tmp_path.iterdir()] == ["outside"]
    assert outside.stat().st_mode & 0o777 == 0o500
