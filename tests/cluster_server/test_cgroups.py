"""What is written for the kernel. That it is obeyed needs controllers, which containers seldom have."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster_server.processes.cgroups import Cgroups


@pytest.mark.parametrize(
    ("memory_bytes", "cpu_millis", "memory", "cpu"),
    [(1 << 30, 1500, "1073741824", "150000 100000"), (0, 0, "max", "max 100000")],
)
def test_limits_are_set_before_the_process_is_in_its_group(
    tmp_path: Path, memory_bytes: int, cpu_millis: int, memory: str, cpu: str
) -> None:
    groups = Cgroups(tmp_path, frozenset({"memory", "cpu"}))
    group = groups.place("chat-0", 4711, memory_bytes, cpu_millis)
    told = {path.name: path.read_text() for path in group.iterdir()}
    assert told == {
        "memory.max": memory,
        "memory.oom.group": "1",
        "cpu.max": cpu,
        "cgroup.procs": "4711",
    }
    assert groups.limits().endswith("memory and processor time are limited.")


def test_without_a_controller_there_is_no_such_limit_and_it_is_said(tmp_path: Path) -> None:
    groups = Cgroups(tmp_path, frozenset({"cpu"}))
    group = groups.place("chat-0", 4711, 1 << 30, 500)
    assert {path.name for path in group.iterdir()} == {"cpu.max", "cgroup.procs"}
    assert "without the controllers memory: " in groups.limits()
