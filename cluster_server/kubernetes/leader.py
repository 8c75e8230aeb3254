"""Which of several Cluster Servers works: the holder of a Lease. The others wait for it.

Times are measured on the own clock only: a Lease that has not changed for its duration is free, whatever
time is written in it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from datetime import UTC, datetime
from typing import Any, Final

from cluster_server.kubernetes.api import (
    LEASE,
    Api,
    Document,
    Missing,
    Refused,
    Taken,
    TooOld,
    Unavailable,
)
from cluster_server.kubernetes.options import LeaseTimes

log = logging.getLogger(__name__)

NAME: Final = "tidegate-cluster-server"
RELEASES_MAX: Final = 3  # attempts, each after a renewal that was still under way
# Nothing is known of the Lease then. An API server that has just started refuses those whose rights it
# has not read yet.
NO_WORD: Final = (Unavailable, Refused, TooOld)


class Leadership:
    """`identity`: no two servers have the same."""

    def __init__(self, api: Api, identity: str, times: LeaseTimes) -> None:
        self.life = 0  # how often the Lease was taken, by anybody
        self.is_lost = asyncio.Event()
        self._api = api
        self._identity = identity
        self._times = times
        self._held: Document | None = None
        self._task: asyncio.Task[None] | None = None

    async def acquire(self) -> None:
        """Wait until it is ours, and keep it from then on. Raises Refused."""
        seen, since = "", time.monotonic()
        while True:
            with contextlib.suppress(Unavailable, Taken):
                found = await self._read()
                if found is None:
                    self._held = await self._api.create(LEASE, self._document(None))
                    break
                version = found["metadata"]["resourceVersion"]
                if version != seen:
                    seen, since = version, time.monotonic()
                if self._is_free(found, time.monotonic() - since):
                    self._held = await self._api.replace(LEASE, self._document(found))
                    break
            await asyncio.sleep(self._times.renew_seconds * random.uniform(0.5, 1.0))  # noqa: S311
        self.life = int(self._held["spec"]["leaseTransitions"])
        log.info("%s leads", self._identity)
        self._task = asyncio.create_task(self._keep(self._held), name="lease")

    async def release(self) -> None:
        """Let the next one have it at once."""
        if self._task:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        with contextlib.suppress(*NO_WORD, Missing):
            for _ in range(RELEASES_MAX):
                if self._held is None or self._held["spec"].get("holderIdentity") != self._identity:
                    break
                free = self._renewed(self._held, holderIdentity="", leaseDurationSeconds=1)
                try:
                    await self._api.replace(LEASE, free)
                    break
                except Taken:  # by a renewal of ours that was under way, or by somebody else
                    self._held = await self._read()
        self._held = None

    async def _keep(self, held: Document) -> None:
        """Returns when another server could have it, for whatever reason."""
        try:
            await self._renew(held)
        except asyncio.CancelledError:
            raise  # it is being released
        except Exception:
            log.exception("The Lease cannot be kept")
        log.error("%s does not lead any more", self._identity)
        self._held = None
        self.is_lost.set()

    async def _renew(self, held: Document) -> None:
        renewed_at = time.monotonic()
        while time.monotonic() - renewed_at < self._times.give_up_seconds:
            await asyncio.sleep(self._times.renew_seconds)
            began = time.monotonic()
            renewing = asyncio.ensure_future(self._api.replace(LEASE, self._renewed(held)))
            renewing.add_done_callback(_take_error)
            try:
                # A request is not cut off: it may have been done.
                left = self._times.give_up_seconds - (began - renewed_at)
                await asyncio.wait([renewing], timeout=left)
                if not renewing.done():
                    break
                held = renewing.result()
                self._held, renewed_at = held, began
            except NO_WORD as error:
                log.warning("The Lease is not renewed: %s", error)
            except (Taken, Missing):
                # By our own renewal, of which the answer was lost; or by somebody else.
                found = await self._reread(held)
                if found is None or found["spec"].get("holderIdentity") != self._identity:
                    break
                held = found

    async def _reread(self, held: Document) -> Document | None:
        try:
            return await self._read()
        except NO_WORD:
            return held

    async def _read(self) -> Document | None:
        try:
            return await self._api.get(LEASE, NAME)
        except Missing:
            return None

    def _is_free(self, lease: Document, unchanged_seconds: float) -> bool:
        spec = lease.get("spec", {})  # one that was made by hand may have none
        if not spec.get("holderIdentity") or spec["holderIdentity"] == self._identity:
            return True
        seconds: float = spec.get("leaseDurationSeconds", self._times.lease_seconds)
        return unchanged_seconds > seconds

    def _document(self, before: Document | None) -> Document:
        now = _now()
        spec = before.get("spec", {}) if before else {}
        metadata: Document = {"name": NAME}
        if before:
            metadata["resourceVersion"] = before["metadata"]["resourceVersion"]
        return {
            "metadata": metadata,
            "spec": {
                "holderIdentity": self._identity,
                "leaseDurationSeconds": max(1, round(self._times.lease_seconds)),
                "acquireTime": now,
                "renewTime": now,
                "leaseTransitions": spec.get("leaseTransitions", 0) + 1,
            },
        }

    def _renewed(self, held: Document, **changed: Any) -> Document:
        metadata = {"name": NAME, "resourceVersion": held["metadata"]["resourceVersion"]}
        return {"metadata": metadata, "spec": {**held["spec"], "renewTime": _now(), **changed}}


def _take_error(done: asyncio.Future[Document]) -> None:
    """Of a request that nobody waits for any more."""
    if not done.cancelled():
        done.exception()


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
