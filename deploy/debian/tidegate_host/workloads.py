"""Instances of workloads on this machine. They outlive the Cluster Server (`KillMode=process`), so that
it can be started again beside them. Without it nobody looks after them: they are ended with its role.
"""

from __future__ import annotations

import errno
import select
import time
from pathlib import Path
from typing import Final

from tidegate_host.machine import Failed, Machine

UNIT: Final = "tidegate-cluster.service"
GROUP: Final = Path("/sys/fs/cgroup/system.slice") / UNIT  # of all that the unit has started
TERM_SECONDS: Final = 30.0
KILL_SECONDS: Final = 10.0


def end(machine: Machine) -> None:
    """All that is left of a unit that was stopped. Raises Failed."""
    if not machine.is_booted or not _is_populated(GROUP):
        return
    machine.tell("end all instances of workloads on this machine")
    for signal, seconds in (("SIGTERM", TERM_SECONDS), ("SIGKILL", KILL_SECONDS)):
        machine.run("systemctl", "kill", "--kill-whom=all", f"--signal={signal}", UNIT)
        if machine.dry_run or is_empty_within(GROUP, seconds):
            return
    raise Failed(f"Processes in {GROUP} do not end: `systemd-cgls --unit {UNIT}` shows them.")


def is_empty_within(group: Path, seconds: float) -> bool:
    """Whether the last process of this control group ends in time. The kernel says so."""
    until = time.monotonic() + seconds
    try:
        with (group / "cgroup.events").open() as events:
            changed = select.poll()
            changed.register(events, select.POLLPRI)
            while "populated 1" in events.read():
                left = until - time.monotonic()
                if left <= 0:
                    return False
                changed.poll(left * 1000)
                events.seek(0)
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENODEV):  # systemd has removed it
            raise
    return True


def _is_populated(group: Path) -> bool:
    try:
        return "populated 1" in (group / "cgroup.events").read_text()
    except FileNotFoundError:
        return False
