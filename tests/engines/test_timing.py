"""The timing of emulated replicas is that of a real engine, as far as first tokens go."""

from __future__ import annotations

import os
import subprocess
import sys

import msgspec
import pytest

from benchmarks.routing.calibrate import Comparison
from console.environment import PROJECT

pytestmark = [pytest.mark.engines, pytest.mark.timeout(600)]


def test_first_tokens_come_when_the_model_says() -> None:
    """Measured and compared on the machine that it runs on."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.routing.calibrate", "--compare"],
        cwd=PROJECT,
        env={**os.environ},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    found = msgspec.json.decode(done.stdout.splitlines()[-1], type=Comparison)
    assert found.model_seconds == pytest.approx(found.real_seconds, rel=0.25)
    assert found.median_error < 0.3
