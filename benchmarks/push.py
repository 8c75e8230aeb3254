"""How long it takes until every driver has a policy that was saved: a hundred drivers, a real worker of
Celery, PostgreSQL and Redis of its own, an agent with a shard for each. For `benchmarks.policies`. Once
in the clear, as on loopback, and once as it is elsewhere: with a key and a certificate for each driver.

The drivers share one process, whose hundred HTTP servers share one core; real ones have cores of their
own. As `python -m benchmarks.push` this is that process.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import psutil

from benchmarks.children import cpu_seconds, running
from benchmarks.harness import Row, limited, percentile
from benchmarks.own_console import own_console
from console.environment import PROJECT
from kvss_agent.process import daemon
from kvss_agent.security.identity import ProcessIdentity
from kvss_agent.security.trust import Trust
from kvss_agent.shard.arena import slot_bytes_for
from swdriver_shim.daemon.service import Service
from swdriver_shim.daemon.shim import Shim
from swdriver_shim.keys import COLUMN_TOKENS
from swdriver_shim.replay.fleet import Agent

DRIVERS: Final = 100
ORGS: Final = 100
P99_SECONDS: Final = 2.0
BYTES_PER_TOKEN: Final = 64
SECRET: Final = b"a secret that only a benchmark knows"
TOKEN: Final = "t" * 40
WAIT_SECONDS: Final = 60.0
WORKER: Final = (
    *("-m", "celery", "-A", "console.celery", "worker", "--concurrency", "1"),
    *("--include", "benchmarks.push_homes", "--without-gossip", "--without-mingle"),
)
MODEL: Final = {
    "name": "llama",
    "groups": [{"name": "full", "bytes_per_token": [BYTES_PER_TOKEN]}],
}


Ports = dict[str, tuple[int, int]]  # of each driver, in the clear and over TLS


def push_rows(*, quick: bool) -> list[Row]:
    names = [f"job-{number}" for number in range(DRIVERS)]
    with contextlib.ExitStack() as stack:
        directory = stack.enter_context(own_console())
        agent = stack.enter_context(Agent(directory / "agent", None))
        agent.apply([_shard(name) for name in names], [_peer(name) for name in names])
        os.environ["BENCH_AGENT"] = agent.address
        keys = {name: _certified(name, directory / name) for name in names}
        drivers, ports = stack.enter_context(_drivers(directory, names))
        worker = stack.enter_context(running(WORKER, directory / "worker.log"))
        processes, times = {"worker": worker, "drivers": drivers}, 20 if quick else 200
        _join({name: plain for name, (plain, _) in ports.items()})
        _make_orgs()
        rows = [_measured(f"push.{DRIVERS}", range(times), processes)]
        _have_keys({name: (port, keys[name]) for name, (_, port) in ports.items()})
        _measured("", range(times, times + 1), processes)  # the worker has made a key of its own then
        more = range(times + 1, 2 * times + 1)
        return [*rows, _measured(f"push.{DRIVERS}.keys", more, processes)]


def _make_orgs() -> None:
    from console.accounts.principal import SYSTEM
    from console.control.models import Change
    from console.orgs import services as orgs

    for number in range(ORGS):
        orgs.create_org(SYSTEM, slug=f"org-{number}", name=f"Org {number}")
    _until_applied(Change.objects.latest("id").pk)


def _measured(name: str, numbers: range, processes: dict[str, psutil.Process]) -> Row:
    before = {of: cpu_seconds(process, with_children=True) for of, process in processes.items()}
    seconds = [_saved(number) for number in numbers]
    more = {"p50, s": percentile(seconds, 0.5), "saved": float(len(numbers)), "orgs": float(ORGS)}
    for which, process in processes.items():
        used = cpu_seconds(process, with_children=True) - before[which]
        more[f"CPU of {which}, ms"] = 1000 * used / len(numbers)
    return limited(f"{name}.p99", percentile(seconds, 0.99), "s", P99_SECONDS, more)


def _saved(number: int) -> float:
    """From before a policy is saved until the last driver has said that it holds."""
    from django.db import transaction

    from console.accounts.principal import SYSTEM
    from console.orgs.services import for_change
    from console.policies.services import set_policy
    from swdriver_shim.policy import OrgPolicies, Policy

    with transaction.atomic():
        wanted = OrgPolicies(policy=Policy(ttl_last_use_seconds=600 + number))
        began = time.time()
        held = set_policy(SYSTEM, for_change(SYSTEM, "org-0"), wanted, reason="to see how long it takes")
    assert held.version is not None
    assert held.version.change is not None
    return _until_applied(held.version.change.pk) - began


def _until_applied(change: int) -> float:
    from console.control.models import Change

    deadline = time.monotonic() + WAIT_SECONDS
    while (at := Change.objects.get(pk=change).applied_at) is None:
        if time.monotonic() > deadline:
            raise TimeoutError(f"Change {change} did not reach all drivers in {WAIT_SECONDS:g} s.")
        time.sleep(0.005)
    return at.timestamp()


def _join(ports: dict[str, int]) -> None:
    from django.utils import timezone

    from console.fleet.models import Driver
    from console.sessions.models import DriverOrg

    for name, port in ports.items():
        now = timezone.now()
        driver = Driver.objects.create(
            name=name,
            control_url=f"http://127.0.0.1:{port}",
            control_token=TOKEN,
            model=MODEL,
            joined_at=now,
            last_heartbeat_at=now,
            heartbeat_sha256=b"x" * 32,
        )
        DriverOrg.objects.create(driver=driver)  # all orgs


def _certified(name: str, state_dir: Path) -> str:
    """A driver's key, and with it, in its state directory, what the console has issued for it."""
    from console.authority import services
    from kvss_agent.security.certificates import Role

    state_dir.mkdir()
    own = ProcessIdentity.load(state_dir, f"driver:{name}")
    issued = services.issue(Role.DRIVER, name, own.public_key_pem)
    Trust.load(own).accept(issued.certificate, issued.bundle.authorities, issued.bundle.digest)
    return own.public_key_pem


def _have_keys(at: dict[str, tuple[int, str]]) -> None:
    """From here on they are asked over TLS, and have to show the certificate for their key."""
    from console.fleet.models import Driver

    for name, (port, key) in at.items():
        Driver.objects.filter(name=name).update(control_url=f"https://127.0.0.1:{port}", public_key=key)


def _shard(name: str) -> dict[str, Any]:
    size = slot_bytes_for(BYTES_PER_TOKEN * COLUMN_TOKENS)
    return {"name": name, "driver": name, "slot_bytes": size, "slots": 4, "part": name, "applied": 0}


def _peer(name: str) -> dict[str, str]:
    return {"name": name, "secret": base64.b64encode(SECRET).decode()}


@contextlib.contextmanager
def _drivers(directory: Path, names: list[str]) -> Iterator[tuple[psutil.Process, Ports]]:
    """The process that they are in, and the ports that each listens at: in the clear, and over TLS."""
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.push", str(directory), *names],
        cwd=PROJECT,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        yield psutil.Process(process.pid), json.loads(process.stdout.readline())
    finally:
        process.terminate()
        process.wait(60)


async def _serve(directory: Path, names: list[str]) -> None:
    daemon.use_all_descriptors()
    stop = daemon.stop_signal()
    shims = [Shim(name, None) for name in names]
    async with contextlib.AsyncExitStack() as stack:
        ports: dict[str, list[int]] = {name: [] for name in names}
        for name, shim in zip(names, shims, strict=True):
            own = ProcessIdentity.load(directory / name, f"driver:{name}")
            application = Service(shim, TOKEN, own).application()
            for tls in (None, Trust.load(own).for_control):
                listener = daemon.listen(("127.0.0.1", 0))
                ports[name].append(listener.getsockname()[1])
                await stack.enter_async_context(daemon.http_server(application, listener, tls=tls))
        print(json.dumps(ports), flush=True)
        await stop.wait()
    for shim in shims:
        await asyncio.to_thread(shim.stop)


if __name__ == "__main__":
    asyncio.run(_serve(Path(sys.argv[1]), sys.argv[2:]))
