"""The API does what its own description says, whatever is thrown at it: all of schemathesis' checks,
against a real server process."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import jwt
import pytest

from tests.live import live_console

# The same throws every time, so that a red run is about the change; SEED=… looks elsewhere, and
# EXAMPLES=… for longer: so many of each operation and kind of data.
SEED = os.environ.get("SEED", "1")
EXAMPLES = os.environ.get("EXAMPLES", "5")
# A DELETE that is sent again with its Idempotency-Key is answered 204 again, as it must be, also when an
# org of that name was made anew meanwhile: test_machinery.py holds that what is deleted is gone. And
# that of an operation cancels it.
LEFT_OUT = "use_after_free"
CONFIG = Path(__file__).with_name("schemathesis.toml")
ISSUER: dict[str, str] = {
    "TIDEGATE_JWT_ALGORITHM": "HS256",
    "TIDEGATE_JWT_KEY": "a secret shared by the issuer and the console",
    "TIDEGATE_JWT_ISSUER": "tests",
    "TIDEGATE_JWT_AUDIENCE": "tests",
}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_api_keeps_its_contract(tmp_path: Path) -> None:
    with live_console(tmp_path, ISSUER) as console:
        # A JWT, since the test also revokes whatever tokens it finds.
        now = int(time.time())
        claims = {"sub": console.username, "iss": "tests", "aud": "tests", "iat": now, "exp": now + 900}
        bearer = jwt.encode(claims, ISSUER["TIDEGATE_JWT_KEY"], algorithm="HS256")
        done = subprocess.run(
            [
                *(str(Path(sys.executable).with_name("st")), "--config-file", str(CONFIG), "run"),
                f"{console.address}/api/v1/openapi.json",
                *("--seed", SEED, "--checks", "all", "--exclude-checks", LEFT_OUT),
                *("--max-examples", EXAMPLES),
                *("--header", f"Authorization: Bearer {bearer}"),
                *("--suppress-health-check", "all", "--no-color"),
            ],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
