"""What a stack takes at rest: with what has ended meanwhile, once each."""

from __future__ import annotations

import subprocess
import sys

from benchmarks.starts import Used, _used, used_between


def test_what_has_ended_is_counted_once() -> None:
    before = {
        1: Used("up", 0, 10.0),
        2: Used("postgres", 1, 5.0),
        3: Used("a backend", 2, 2.0),
        4: Used("web", 1, 1.0),
        6: Used("beat", 1, 2.0),
    }
    after = {  # 3 took another half second, one that nobody saw 0.25; 6 has ended a moment ago
        1: Used("up", 0, 10.5),
        2: Used("postgres", 1, 5.0 + 2.5 + 0.25),
        4: Used("web", 1, 2.0),
        5: Used("worker", 1, 3.0),
        6: Used("other", 1, 2.25),
    }
    assert used_between(before, after) == {
        "up": 0.5,
        "postgres": 0.75,
        "web": 1.0,
        "worker": 3.0,
        "beat": 0.25,
    }


def test_processes_are_seen_with_their_children_that_have_ended() -> None:
    turn = "import time\nwhile time.process_time() < 0.3: pass\n"
    parent = (
        f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {turn!r}])\n"
        "print(1, flush=True)\ninput()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", parent], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout
        process.stdout.readline()
        [seen] = _used(process.pid).values()
        process.communicate(b"\n")
    assert seen.seconds >= 0.29
