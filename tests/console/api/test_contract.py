"""The API does what its own description says, whatever is thrown at it: all of schemathesis' checks,
against a real server process.

It is asked in parts, so that workers share them. `make contract` throws more, and leaves nothing out.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import httpx
import jwt
import pytest

from console.environment import PROJECT
from tests.live import live_console

# The same throws every time, so that a red run is about the change; SEED=… looks elsewhere, and
# EXAMPLES=… for longer: so many of each operation and kind of data, and for each of them so many ways
# through operations.
SEED = os.environ.get("SEED", "1")
EXAMPLES = os.environ.get("EXAMPLES")
DATA = int(EXAMPLES or 2)
WAYS_PER_DATA = 25
# A DELETE that is sent again with its Idempotency-Key is answered 204 again, as it must be, also when an
# org of that name was made anew meanwhile: test_machinery.py holds that what is deleted is gone. And
# that of an operation cancels it.
LEFT_OUT = "use_after_free"
# Every value at the edge of every schema, which are most of the throws. Of operations that take the same
# schema through the same code, every day one gets them; all get the others' parts.
ALIKE = (
    *("--exclude-path", "/api/v1/metrics/query.csv"),  # as metrics/query
    # As orgs/{slug}/policy.
    *("--exclude-path", "/api/v1/orgs/{slug}/policy:preview"),
    *("--exclude-path", "/api/v1/orgs/{slug}/policy/scheduled"),
    *("--exclude-path", "/api/v1/policies/cluster"),
    *("--exclude-path", "/api/v1/orgs/{slug}/session-rules"),  # as session-rules
    *("--exclude-path", "/api/v1/alert-channels/{channel_id}"),  # as alert-channels
    *("--exclude-name", "PUT /api/v1/workloads/{name}"),  # as POST workloads: a tenth of all throws
)
EDGES = ("--phases", "examples,coverage")
HALF = "^/api/v1/(orgs|alert|polic|s)"
PARTS = {
    "edges of orgs, alerts and sessions": (*EDGES, "--include-path-regex", HALF),
    "edges of all else": (*EDGES, "--exclude-path-regex", HALF),
    "any data": ("--phases", "fuzzing", "--max-examples", str(DATA)),
    "any order": ("--phases", "stateful", "--max-examples", str(DATA * WAYS_PER_DATA)),
}
CONFIG = Path(__file__).with_name("schemathesis.toml")
# What Hypothesis computes of all of Unicode, for seconds, and stores: that of the tests, for all parts.
# What else it stores is of each part alone, so that no throw depends on another run.
UNICODE = PROJECT / ".hypothesis" / "unicode_data"
# It looks for proxies in all of its environment before each request.
ENVIRONMENT = {name: os.environ[name] for name in ("PATH", "LANG", "TMPDIR") if name in os.environ}
ENVIRONMENT |= {"SCHEMATHESIS_HOOKS": "tests.console.api.hooks", "PYTHONPATH": str(PROJECT)}
ISSUER: dict[str, str] = {
    "TIDEGATE_JWT_ALGORITHM": "HS256",
    "TIDEGATE_JWT_KEY": "a secret shared by the issuer and the console",
    "TIDEGATE_JWT_ISSUER": "tests",
    "TIDEGATE_JWT_AUDIENCE": "tests",
}


@pytest.mark.slow
@pytest.mark.timeout(600 if EXAMPLES is None else 0)
@pytest.mark.parametrize("part", PARTS)
def test_the_api_keeps_its_contract(part: str, tmp_path: Path) -> None:
    options = list(PARTS[part])
    if EXAMPLES is None and part.startswith("edges"):
        options += ALIKE
    UNICODE.mkdir(parents=True, exist_ok=True)
    (tmp_path / ".hypothesis").mkdir()
    (tmp_path / ".hypothesis" / UNICODE.name).symlink_to(UNICODE)
    with live_console(tmp_path, ISSUER) as console:
        # A JWT, since the test also revokes whatever tokens it finds.
        now = int(time.time())
        claims = {"sub": console.username, "iss": "tests", "aud": "tests"}
        times = {"iat": now, "exp": now + 86_400}
        bearer = jwt.encode({**claims, **times}, ISSUER["TIDEGATE_JWT_KEY"], algorithm="HS256")
        # The first description takes a while to make, and schemathesis gives up soon on a busy machine.
        httpx.get(f"{console.address}/api/v1/openapi.json", timeout=120).raise_for_status()
        done = subprocess.run(
            [
                *(str(Path(sys.executable).with_name("st")), "--config-file", str(CONFIG), "run"),
                f"{console.address}/api/v1/openapi.json",
                *("--seed", SEED, "--checks", "all", "--exclude-checks", LEFT_OUT),
                *options,
                *("--header", f"Authorization: Bearer {bearer}"),
                *("--suppress-health-check", "all", "--no-color", "--request-timeout", "60"),
            ],
            cwd=tmp_path,
            env=ENVIRONMENT,
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
