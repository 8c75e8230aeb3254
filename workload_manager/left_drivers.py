"""What drivers leave on a machine: it is deleted once the console has removed or replaced them.

A driver's state directory has secrets and data keys of orgs. It stays when its instance has ended, since
the next instance of the same replica goes on with it. Whether there will be one only the console knows:
so it is asked, as the driver's heartbeats ask it, and told when all is deleted. From then on receipts of
purges do not name the driver as one that may still have a key.

    drivers/NAME/console    where it is asked
    drivers/NAME/token      as which it is known; deleted last, for the console has to be told
    drivers/NAME/lock       held meanwhile: a driver that runs is left alone
"""

from __future__ import annotations

import logging
import os
import shutil
import ssl
from http import HTTPStatus
from pathlib import Path
from typing import Final

import msgspec

from kvss_agent.http.answers import Budget, Unanswered
from kvss_agent.http.exchange import Exchange, run
from kvss_agent.process.durable_file import write_durably
from kvss_agent.process.membership import Console, credential
from kvss_agent.process.state_dir import try_lock
from telemetry.decoder import Malformed, decode

log = logging.getLogger(__name__)

EVERY_SECONDS: Final = 60.0
BUDGET: Final = Budget(5.0)
ADDRESS, TOKEN, LOCK = "console", "token", "lock"


class Address(msgspec.Struct, frozen=True):
    url: str
    ca: str | None = None


class _Answer(msgspec.Struct):
    removed: bool


def note_console(directory: Path, url: str, ca: str | None) -> None:
    """Where to ask about the driver that has this state directory. Raises OSError."""
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    write_durably(directory / ADDRESS, msgspec.json.encode(Address(url, ca)))


def delete_left(drivers: Path) -> list[str]:
    """Look at all drivers that do not run here; returns those of which everything was deleted. One that
    can't be asked about, or told of, is left for the next time."""
    if not drivers.is_dir():
        return []
    deleted, silent = [], set[str]()
    for directory in sorted(drivers.iterdir()):
        try:
            if (found := _known(directory)) is None:
                continue
            address, token = found
            if address.url in silent or (lock := try_lock(directory)) is None:
                continue
            with lock:
                try:
                    is_deleted = run(_delete(directory, address, token))
                except Unanswered as error:
                    silent.add(address.url)
                    log.warning("The console can't be asked about driver %s: %s", directory.name, error)
                    continue
            if is_deleted:
                deleted.append(directory.name)
        except (OSError, Malformed, UnicodeDecodeError) as error:
            log.warning("What driver %s has left can't be deleted: %s", directory.name, error)
    return deleted


def _known(directory: Path) -> tuple[Address, str] | None:
    """Raises OSError, Malformed, and UnicodeDecodeError."""
    try:
        address = decode((directory / ADDRESS).read_bytes(), Address)
        return address, (directory / TOKEN).read_text().strip()
    except (FileNotFoundError, NotADirectoryError):
        return None


async def _delete(directory: Path, address: Address, token: str) -> bool:
    """Raises Unanswered, OSError and Malformed."""
    verify = Console(address.url, authorities=Path(address.ca) if address.ca else None).verify()
    context = verify if isinstance(verify, ssl.SSLContext) else ssl.create_default_context()
    shown = credential(token, f"driver:{directory.name}")
    url = f"{address.url.rstrip('/')}/api/v1/drivers/{directory.name}/erased"
    async with Exchange(context) as exchange:

        async def is_removed(*, erased: bool) -> bool:
            body = msgspec.json.encode({"erased": erased})
            answer = await exchange.ask("POST", url, shown, BUDGET, body)
            return answer.status_code == HTTPStatus.OK and answer.read(_Answer).removed

        if not await is_removed(erased=False):
            return False
        _empty(directory, {ADDRESS, TOKEN, LOCK})
        if not await is_removed(erased=True):
            return False
    _empty(directory, {LOCK})  # which others may be waiting for
    log.info("Driver %s was removed from the fleet: what it had here is deleted", directory.name)
    return True


def _empty(directory: Path, kept: set[str]) -> None:
    for path in directory.iterdir():
        if path.name in kept:
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)  # else it might be there again after the machine has crashed
    finally:
        os.close(descriptor)
