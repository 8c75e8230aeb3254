"""Whose turn it is among jobs."""

from __future__ import annotations

from dataclasses import dataclass, replace

from cluster_server.turns import may_run, workload_of


@dataclass(frozen=True)
class Job:
    name: str
    submitted_at: float = 0.0
    ended_at: float = 0.0
    has_begun: bool = False

    @property
    def has_ended(self) -> bool:
        return bool(self.ended_at)


def compiling(workload: str, number: int, at: float, ended_at: float = 0.0) -> Job:
    return Job(f"compile-{workload}-r{number}-{number}-0", at, ended_at)


def names(jobs: list[Job]) -> list[str]:
    return [workload_of(one.name).removeprefix("workload ") for one in jobs]


def test_the_workload_of_a_job_is_in_its_name() -> None:
    assert workload_of("compile-chat-r3-17-0") == "workload chat"
    assert workload_of("compile-chat-r3-17-0-b4-2") == "workload chat"
    assert workload_of("compile-a-r1-2-3-r4-5-6") == "workload a-r1-2-3"
    assert workload_of("compile-7") == "job compile-7"
    assert workload_of("execute-chat-r3-17-0") == "job execute-chat-r3-17-0"


def test_a_workload_with_many_jobs_takes_one_place() -> None:
    many = [compiling("mine", number, float(number)) for number in range(900)]
    theirs = [compiling(f"w{number}", 1, 1000.0 + number) for number in range(5)]
    assert names(may_run([*many, *theirs], 4)) == ["mine", "w0", "w1", "w2"]


def test_who_had_a_turn_waits_behind_who_was_there() -> None:
    jobs = [compiling("mine", 1, 1.0, ended_at=50.0), compiling("mine", 2, 1.0)]
    theirs = [compiling("a", 1, 2.0), compiling("b", 1, 3.0), compiling("c", 1, 60.0)]
    assert names(may_run([*jobs, *theirs], 4)) == ["a", "b", "mine", "c"]


def test_what_runs_keeps_its_place_and_no_more_than_that_many_run() -> None:
    running = [replace(compiling(f"w{number}", 1, 9.0), has_begun=True) for number in range(2)]
    waiting = [compiling("w0", 2, 1.0), compiling("early", 1, 1.0)]
    assert may_run([*waiting, *running], 2) == running
    assert names(may_run([*waiting, *running], 3)) == ["w0", "w1", "early"]
