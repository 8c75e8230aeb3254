"""`python -m workload_manager run`: one instance, until it is gone."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Sequence
from typing import Final

import uvloop

from kvss_agent.documents import Invalid
from kvss_agent.process import daemon
from kvss_agent.process.options import WrongSettings
from kvss_agent.process.settings import is_loopback
from workload_manager.manager import Manager
from workload_manager.settings import Settings, parse
from workload_manager.spec import InstanceSpec, Secrets, read_secrets
from workload_manager.spec import parse as parse_spec

log = logging.getLogger("workload_manager")

EX_CONFIG: Final = 78


def main(arguments: Sequence[str]) -> int:
    try:
        settings = parse(arguments, os.environ, "run")
        spec = parse_spec((settings.folder / "spec.json").read_bytes())
        secrets = read_secrets(settings.folder)
        _check(settings, secrets)
    except (WrongSettings, Invalid, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return EX_CONFIG
    daemon.set_up_logs(settings)
    daemon.use_all_descriptors()
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_run(settings, spec, secrets))
    except OSError as error:
        sys.stderr.write(f"The manager cannot start: {error}\n")
        return 1
    return 0


def _check(settings: Settings, secrets: Secrets) -> None:
    """Raises Invalid."""
    host, port = settings.listen
    if not secrets.api_key and not is_loopback(host):
        raise Invalid(
            f"--listen {host}:{port} can be reached by others, and the instance has no key: anybody "
            "could use its engine. Give it an api_key, or listen on 127.0.0.1."
        )


async def _run(settings: Settings, spec: InstanceSpec, secrets: Secrets) -> None:
    manager = Manager(settings, spec, secrets)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, manager.drain)
    await manager.run()
