"""An execute job as a process, with a real engine process: asked, and ended to the last one."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from msgspec.json import decode

from console.environment import PROJECT
from tests.live import wait_until
from tests.workload_manager.managers import SECONDS, is_alive
from workload_manager import preparation
from workload_manager.execution import ExecuteSpec, Execution
from workload_manager.settings import LOCAL, parse
from workload_manager.spec import Secrets

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

TINY: dict[str, Any] = {
    "kind": "command",
    "command": [sys.executable, "-m", "tests.workload_manager.tiny_engine", "{port}", "."],
    "environment": {"PYTHONPATH": str(PROJECT)},
}


class Job:
    def __init__(self, folder: Path, *requests: Any, engine: dict[str, Any] | None = None) -> None:
        self.folder = folder / "job"
        self.folder.mkdir()
        instance = {
            "workload": "batch",
            "replica": "batch-0",
            "instance": "job",
            "revision": 1,
            "model": "tiny",
            "tokens_max": 4096,
            "grace_seconds": 5.0,
            "engine": engine or TINY,
        }
        spec = {"instance": instance, "requests": requests}
        (self.folder / "spec.json").write_text(json.dumps(spec))

    def start(self) -> subprocess.Popen[bytes]:
        with (self.folder / "log").open("ab") as log:
            return subprocess.Popen(
                [
                    *(sys.executable, "-m", "workload_manager", "execute"),
                    *("--folder", str(self.folder), "--state-dir", str(self.folder.parent / "state")),
                ],
                cwd=self.folder,
                env={**os.environ, "PYTHONPATH": str(PROJECT)},
                stdout=log,
                stderr=log,
            )

    def run(self) -> int:
        return self.start().wait(SECONDS)

    def read(self, name: str) -> Any:
        path = self.folder / f"{name}.json"
        assert path.exists(), (self.folder / "log").read_text()[-3000:]
        return json.loads(path.read_text())

    @property
    def seen(self) -> list[str]:
        path = self.folder / "seen"
        return path.read_text().splitlines() if path.exists() else []

    def assert_no_engine_is_left(self) -> None:
        assert not [one for one in self.seen if one.startswith("started") and is_alive(int(one[8:]))]


def test_answers_are_its_result_in_the_order_of_the_requests(tmp_path: Path) -> None:
    job = Job(tmp_path, *({"body": {"prompt": str(number)}} for number in range(20)))
    assert job.run() == 0
    answers = job.read("result")["answers"]
    assert [one["body"]["asked"] for one in answers] == [{"prompt": str(n)} for n in range(20)]
    assert {(one["status"], one["body"]["path"]) for one in answers} == {(200, "/v1/completions")}
    assert all(one["seconds"] > 0 for one in answers)
    progress = job.read("progress")
    assert (progress["done"], progress["total"], progress["unit"]) == (20, 20, "requests")
    assert job.seen[-1] == "ended", "the engine was asked to end"
    job.assert_no_engine_is_left()


def test_the_emulator_serves_a_job_without_a_fleet(tmp_path: Path) -> None:
    asked = {"model": "tiny", "prompt": "Why is the sky blue?", "max_tokens": 4}
    too_long = {**asked, "max_tokens": 5000}
    job = Job(tmp_path, {"body": asked}, {"body": too_long}, engine={"kind": "emulator"})
    assert job.run() == 0
    good, bad = job.read("result")["answers"]
    assert good["body"]["usage"]["completion_tokens"] == 4
    assert bad["status"] == 400, "what the engine refuses is an answer"


def test_an_engine_that_crashes_is_asked_again_and_not_for_ever(tmp_path: Path) -> None:
    job = Job(tmp_path, {"path": "/v1/crash", "body": {}})
    assert job.run() == 1
    assert job.read("error")["reason"] == "Unanswered"
    assert sum(one.startswith("started") for one in job.seen) == 3
    job.assert_no_engine_is_left()


def test_an_engine_that_does_not_start_fails_the_job_with_its_last_words(tmp_path: Path) -> None:
    job = Job(tmp_path, {"body": {}})
    (job.folder / "broken").touch()
    assert job.run() == 1
    said = job.read("error")
    assert said["reason"] == "EngineFails"
    assert "no cheese at all" in said["sentence"]


@pytest.mark.parametrize(
    ("engine", "said"),
    [({"kind": "command"}, "needs a command"), ({"kind": "abacus"}, "abacus")],
)
def test_what_can_not_be_executed_is_said(tmp_path: Path, engine: dict[str, Any], said: str) -> None:
    job = Job(tmp_path, {"body": {}}, engine=engine)
    assert job.run() == 1
    assert job.read("error")["reason"] == "Misconfigured"
    assert said in job.read("error")["sentence"]


def test_a_cancelled_job_leaves_no_engine_and_no_result(tmp_path: Path) -> None:
    job = Job(tmp_path, {"body": {"until": "go"}})
    process = job.start()
    wait_until("a request waits", lambda: "waits" in job.seen, SECONDS)
    process.send_signal(signal.SIGTERM)
    assert process.wait(SECONDS) == 128 + signal.SIGTERM
    assert not (job.folder / "result.json").exists()
    job.assert_no_engine_is_left()


def test_what_nobody_has_foreseen_of_its_manager_ends_a_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its last status comes at once, and to ask for the next one again and again kept it from ending."""

    def fail(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(preparation, "prepare", fail)
    monkeypatch.chdir(tmp_path)
    folder = Job(tmp_path, {"body": {}}).folder
    settings = parse(["--folder", str(folder), "--state-dir", str(tmp_path)], {}, "execute")
    spec = decode((folder / "spec.json").read_bytes(), type=ExecuteSpec)
    execution = Execution(replace(settings, listen=LOCAL), spec, Secrets())
    with pytest.raises(RuntimeError, match="new thread"):
        asyncio.run(execution.run())
