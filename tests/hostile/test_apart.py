"""Attackers and the tenant are processes of their own, which end with whoever started them."""

from __future__ import annotations

import os
import threading

import pytest

from tests.hostile.apart import Apart, Failed

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
SECONDS_MAX = 120.0


def its_process(ends: threading.Event) -> int:
    ends.wait()
    return os.getpid()


def fails(_ends: threading.Event) -> None:
    raise ValueError("on purpose")


def test_it_works_in_another_process_until_it_is_told_to_end() -> None:
    with Apart("one", its_process) as one, Apart("another", its_process, yields=True) as another:
        found = []
        for apart in (one, another):
            apart.begin()
            apart.end()
            found.append(apart.result(SECONDS_MAX))
        assert len({os.getpid(), *found}) == 3


def test_work_that_fails_there_fails_here() -> None:
    with Apart("work", fails) as one:
        one.begin()
        with pytest.raises(Failed, match="work has failed"):
            one.result(SECONDS_MAX)


def test_it_ends_though_nobody_has_told_it_to() -> None:
    with Apart("work", its_process) as one:
        one.begin()
        process = one.pid
    with pytest.raises(ProcessLookupError):
        os.kill(process, 0)
