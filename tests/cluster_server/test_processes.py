"""The backend `processes`: what disks, folders and clients that leave do to it."""

from __future__ import annotations

import asyncio
import errno
import shutil
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import pytest

from cluster_server.backend import Exists, NotFound
from cluster_server.processes import backend, folder, surroundings
from cluster_server.processes import instance as asked_by
from cluster_server.processes.folder import About, Folder
from cluster_server.processes.keeper import Keeper
from cluster_server.processes.worker import in_thread
from cluster_server.proto import cluster_pb2 as pb
from tests.cluster_server.conformance.worlds import Processes
from tests.cluster_server.requests import instance, job, workload


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[Processes]:
    made = Processes(tmp_path, has_cgroups=False, spares=0)
    await made.open()
    yield made
    await made.close()


async def test_a_draft_that_a_killed_server_has_left_goes_with_the_next_start(
    world: Processes, tmp_path: Path
) -> None:
    """Else it would stay after its workload was deleted."""
    await world.backend.apply(workload("chat", 1))
    kept, draft = (tmp_path / "workloads" / name for name in ("chat.pb", ".chat.pb.0123.new"))
    draft.write_bytes(b"half of what is wanted")
    await world.restart()
    assert not draft.exists()
    assert kept.exists()


async def test_jobs_that_can_not_be_deleted_hold_up_no_others(
    world: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    remove = shutil.rmtree

    def refuse(path: Any, *arguments: Any, **options: Any) -> None:
        if Path(path).suffix == ".gone" and Path(path).exists():
            raise OSError(5, "Input/output error", str(path))
        remove(path, *arguments, **options)

    monkeypatch.setattr(shutil, "rmtree", refuse)

    def have_run(last: str) -> bool:
        found = {one.name: one.state for one in world.backend.jobs()}
        return last in found and set(found.values()) == {pb.JOB_SUCCEEDED}

    for number in range(8):
        await world.backend.submit(job(f"job-{number}", result=number))
    await world.until("all have run", lambda: have_run("job-7"))
    await world.backend.submit(job("job-8", result=8))  # those that ended at once are tried again then
    await world.until("it has run", lambda: have_run("job-8"))
    await world.until("old ones are forgotten", lambda: len(world.backend.jobs()) <= 6)


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


class SlowDisk:
    """Which does nothing until it `goes_on`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_asked, self.goes_on = threading.Event(), threading.Event()
        for module, name in (
            (folder, "write_durably"),
            (backend, "write_durably"),
            (backend, "_unlink"),
        ):
            monkeypatch.setattr(module, name, partial(self._late, getattr(module, name)))

    def _late(self, function: Callable[..., None], *arguments: Any) -> None:
        self.is_asked.set()
        self.goes_on.wait()
        function(*arguments)

    async def leave(self, asking: Coroutine[Any, Any, object]) -> None:
        """A client that leaves while it writes."""
        task = asyncio.ensure_future(asking)
        await asyncio.to_thread(self.is_asked.wait)
        task.cancel()
        self.goes_on.set()
        with pytest.raises(asyncio.CancelledError):
            await task


async def test_what_a_client_has_submitted_before_it_left_is_there(
    world: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    await SlowDisk(monkeypatch).leave(world.backend.submit(job("compile-x", result="old")))
    assert [one.name for one in world.backend.jobs()] == ["compile-x"]
    with pytest.raises(Exists):
        await world.backend.submit(job("compile-x", result="new"))


async def test_a_job_never_runs_what_another_one_of_its_name_has_left(
    world: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(folder, "sync_directory", lambda _: (_ for _ in ()).throw(OSError("full")))
        with pytest.raises(OSError, match="full"):
            await world.backend.submit(job("compile-x", result="old"))
    with pytest.raises(Exists):
        await world.backend.submit(job("compile-x", result="new"))


async def test_what_a_client_has_applied_before_it_left_is_desired(
    world: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    await SlowDisk(monkeypatch).leave(world.backend.apply(workload("chat", 7, instance("chat-0"))))
    assert world.backend.workload("chat").generation == 7
    await world.until_state("chat", "chat-0", pb.READY)


async def test_what_a_client_has_deleted_before_it_left_is_gone(
    world: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    await world.backend.apply(workload("chat", 1))
    await SlowDisk(monkeypatch).leave(world.backend.delete("chat"))
    with pytest.raises(NotFound):
        world.backend.workload("chat")


async def test_what_nobody_has_foreseen_is_shown_and_tried_again(
    world: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its worker had ended, and nobody looked after the instance any more."""

    def fail(*_: object) -> None:
        raise KeyError("nobody")

    with monkeypatch.context() as patched:
        patched.setattr(Keeper, "look", fail)
        await world.backend.apply(workload("chat", 1, instance("chat-0")))
        shown = "KeyError('nobody')"
        await world.until(
            "it is shown", lambda: getattr(world.status("chat", "chat-0"), "sentence", "") == shown
        )
    await world.until_state("chat", "chat-0", pb.READY)


async def test_what_nobody_has_foreseen_of_asking_a_manager_is_shown_and_it_is_asked_again(
    world: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was not asked until something happened to its process, and was killed for its silence."""

    async def fail(*_: object) -> NoReturn:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(asked_by, "ask", fail)
        await world.backend.apply(workload("chat", 1, instance("chat-0")))
        shown = "Its manager can't be asked: RuntimeError(\"can't start new thread\")"
        await world.until(
            "it is shown", lambda: getattr(world.status("chat", "chat-0"), "sentence", "") == shown
        )
    await world.until_state("chat", "chat-0", pb.READY)


async def test_a_process_that_can_not_be_watched_is_looked_at_again(
    world: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As while no more files may be open."""

    def refuse(*_: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patched:
        patched.setattr(surroundings, "watch", refuse)
        await world.backend.apply(workload("chat", 1, instance("chat-0")))
        await world.until(
            "it is shown",
            lambda: "many open files" in getattr(world.status("chat", "chat-0"), "sentence", ""),
        )
    await world.until_state("chat", "chat-0", pb.READY)


async def test_what_has_no_thread_is_not_done_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would be done beside the attempt that comes after it: a manager would be started twice."""
    goes_on = threading.Event()
    done: list[str] = []
    with ThreadPoolExecutor(2) as executor:
        asyncio.get_running_loop().set_default_executor(executor)
        first = asyncio.ensure_future(in_thread(goes_on.wait))
        await asyncio.sleep(0)

        def refuse(_: threading.Thread) -> None:
            raise RuntimeError("can't start new thread")

        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", refuse)
            with pytest.raises(OSError, match="new thread"):
                await in_thread(done.append, "late")
        goes_on.set()
        assert await first
        await in_thread(done.append, "again")
    assert done == ["again"]
