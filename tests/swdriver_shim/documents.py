"""Desired documents on their way to a driver: late, twice, out of order, several at once, over restarts.

The shim is the real one, with its decider and shards; agents are nowhere, so that shards stay lost and
each new home is tried again and again. What a driver follows is the newest document that it has
accepted, all of it and nothing else; but no org whose tag was purged.

One of the two processes of the console is of the version before until it is upgraded, and so may the
driver be. They know fewer fields: what such a console writes lacks them, and what such a driver gets
with one of them it refuses.
"""

from __future__ import annotations

import contextlib
import random
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Final, Self
from unittest import mock

import msgspec

from kvss_agent.client import Lost, ShardClient
from kvss_agent.desired import Document
from kvss_agent.documents import Conflict, Invalid, decode
from kvss_agent.process.durable_file import write_durably
from swdriver_shim import desired, driver, fair_lock
from swdriver_shim.daemon import shard_homes, stored_document
from swdriver_shim.daemon import shim as shims
from swdriver_shim.daemon.shard_homes import homes_of
from swdriver_shim.daemon.shim import Shim
from swdriver_shim.data_plane import homes, tier2
from swdriver_shim.data_plane.shard import connections, former_homes, moves, reads, slots
from swdriver_shim.data_plane.shard import shard as shards
from swdriver_shim.decider import decider, housekeeping, removals, shard_threads, statistics
from swdriver_shim.desired import (
    ControlSpec,
    Desired,
    GroupSpec,
    HomeSpec,
    ModelSpec,
    OrgSpec,
    token_hash,
)
from swdriver_shim.keys import isolation_tag
from swdriver_shim.policy import OrgPolicies, Policy, Tiers
from tests.one_thread import Process, Turns, installed

MODULES: Final = (
    *(decider, fair_lock, housekeeping, removals, shard_threads, statistics),
    *(driver, shims, shard_homes, tier2, connections, former_homes, moves, reads, shards, slots),
)
ORGS: Final = ("acme", "globex", "initech")
UNDER_WAY_MAX: Final = 6
MEMORY: Final = Path("/dev/shm")  # noqa: S108 - a directory of our own in it


class ControlBefore(Document, frozen=True):
    """What the version before knows of it, as the two below."""

    url: str
    token: str


class HomeBefore(Document, frozen=True):
    group: str
    index: int
    address: str
    shard: str
    control: ControlBefore | None = None
    path: msgspec.Raw | None = None


class OrgBefore(Document, frozen=True):
    name: str
    secret: bytes
    policies: msgspec.Raw = msgspec.Raw(b"{}")
    data_key: bytes | None = None
    tokens: tuple[str, ...] = ()


class DesiredBefore(Document, frozen=True):
    generation: int
    driver: str
    secret: bytes
    model: msgspec.Raw
    homes: tuple[HomeBefore, ...]
    orgs: tuple[OrgBefore, ...] = ()


class Documents:
    def __init__(self, seed: int) -> None:
        self.chance = chance = random.Random(seed)
        self.seen: Counter[str] = Counter()
        self._turns = Turns(chance, restless=0.3)
        self._process = Process("driver")
        self._installed = contextlib.ExitStack()
        self._written: list[bytes] = []  # by generation
        self._accepted = 0  # the newest generation that was said to be
        self._delivering = 0
        self._busy = False  # it is restarted or purges: no document is on its way then
        self._console_before = True  # there still is one
        self._driver_before = chance.random() < 0.5
        self._secrets = dict.fromkeys(ORGS, 0)  # which one each has, by the newer console
        self._purged: set[str] = set()  # tags

    def __enter__(self) -> Self:
        enter = self._installed.enter_context
        where = MEMORY if MEMORY.is_dir() else None
        self._state = Path(enter(tempfile.TemporaryDirectory(prefix="documents-", dir=where)))
        enter(installed(self._turns, MODULES, ("swdriver_shim", "kvss_agent")))
        enter(mock.patch.object(homes, "connect", self._nobody))
        enter(mock.patch.object(shims, "documents", SimpleNamespace(parse=self._parse)))
        enter(mock.patch.object(stored_document, "parse", self._parse))
        enter(mock.patch.object(stored_document.StoredDocument, "write", self._writer()))
        self._shim = Shim("job", self._state)
        self._shim.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._installed.close()

    def what_was_seen(self) -> Counter[str]:
        return self.seen

    def step(self) -> None:
        acts = [self._write, self._deliver, self._restart, self._purge, self._upgrade_console]
        self.chance.choices([*acts, self._go_on], (3, 6, 0.3, 1, 0.05, 20))[0]()
        self._check()

    def come_to_rest(self) -> None:
        """All are upgraded; the newest document comes once more, and holds."""
        self._until_quiet()
        if not self._written:
            return
        self._start_again(is_upgraded=True)
        self._until_quiet()
        self._start(self._written[-1])
        self._until_quiet()
        assert self._accepted == len(self._written)
        self._check()

    def _nobody(self, *_: object) -> ShardClient:
        self._turns.wait(None, self.chance.choice((0.0, 0.1, 3.0)))
        raise Lost("nobody is there")

    def _parse(self, raw: bytes) -> Desired:
        """As the driver's version reads it. Raises Invalid."""
        if self._driver_before:
            decode(raw, _BEFORE)
        return desired.parse(raw)

    def _writer(self) -> Callable[[stored_document.StoredDocument, bytes], None]:
        """Writes as the driver's version does: the one before did not seal."""
        write = stored_document.StoredDocument.write

        def written(document: stored_document.StoredDocument, raw: bytes) -> None:
            if not self._driver_before:
                write(document, raw)
                return
            document.path.parent.mkdir(parents=True, exist_ok=True)
            told = msgspec.json.encode(decode(_without_what_is_new(raw), _BEFORE))
            write_durably(document.path, told)

        return written

    def _write(self) -> None:
        chance, generation = self.chance, len(self._written) + 1
        is_before = self._console_before and chance.random() < 0.5
        orgs = tuple(
            OrgSpec(
                name=name,
                # The older console does not know that a purge gave another one.
                secret=_secret(name, 0),
                secrets={"llama": _secret(name, self._secrets[name])} if self._secrets[name] else {},
                policies=OrgPolicies(
                    policy=Policy(
                        ttl_last_use_seconds=chance.choice((None, 60, 600)),
                        tiers=chance.choice((*Tiers,)),
                    )
                ),
                tokens=(token_hash(f"{name} {chance.randrange(3)}"),),
            )
            for name in ORGS
            if chance.random() < 0.7
        )
        moves = chance.random() < 0.2
        control = ControlSpec("http://127.0.0.1:9", None, "tgp_" + "a" * 20, "0" * 64) if moves else None
        told = Desired(
            generation=generation,
            driver="job",
            secret=b"a secret of the driver and its agents",
            model=ModelSpec(name="llama", groups=(GroupSpec(name="full", bytes_per_token=(16, 16)),)),
            homes=tuple(
                HomeSpec(
                    group="full",
                    index=index,
                    address=f"unix:/{chance.choice(('one', 'two', 'three'))}",
                    shard=f"full.{index}",
                    # A driver without a key is given none; one whose key is new may still be of before.
                    control=control,
                )
                for index in range(2)
            ),
            agents_removed=("unix:/four",) if chance.random() < 0.3 else (),
            agents_moved=(f"tls:five:1#{'5' * 64}",) if chance.random() < 0.3 else (),
            orgs=orgs,
            claims_key=b"k" * 32 if chance.random() < 0.1 else None,
        )
        raw = msgspec.json.encode(told)
        if is_before:
            raw = _without_what_is_new(raw)
            self.seen["an earlier console wrote"] += 1
        self._written.append(raw)

    def _deliver(self) -> None:
        """Rather one of the last; sometimes with other contents than it had."""
        if not self._written or self._delivering >= UNDER_WAY_MAX or self._busy:
            return
        raw = self.chance.choice(self._written[-5:])
        if self.chance.random() < 0.05:
            told = msgspec.json.decode(raw)
            raw = msgspec.json.encode({**told, "orgs": told.get("orgs", [])[1:]})
        self._start(raw)

    def _start(self, raw: bytes) -> None:
        told, shim = self._expected(raw), self._shim
        is_as_written = raw == self._written[told.generation - 1]
        self._delivering += 1

        def come() -> None:
            if self.chance.random() < 0.5:
                self._turns.wait(None, self.chance.choice((0.1, 2.0, 20.0)))
            before = self._accepted
            try:
                accepted = shim.set_desired(raw)
            except Conflict:
                newest = max(before, shim.desired.generation if shim.desired else 0)
                assert told.generation < newest or self._is_other(told, shim), "it was to be taken"
                self.seen["an older one came" if told.generation < newest else "another came"] += 1
            except Invalid:
                assert self._driver_before, "it was to be understood"
                assert _without_what_is_new(raw) != raw
                self.seen["an earlier driver refused what is new"] += 1
            else:
                assert accepted == told
                self.seen["it came twice" if told.generation <= before else "it was taken"] += 1
                self.seen["one was skipped"] += told.generation > before + 1
                if not is_as_written:  # the first that comes is the one that holds
                    self._written[told.generation - 1] = raw
                self._accepted = max(self._accepted, told.generation)
            self._delivering -= 1

        self._turns.start(come, "deliver", self._process)

    def _expected(self, raw: bytes) -> Desired:
        """What is followed of it: not the orgs that have a tag that was purged."""
        told = desired.parse(raw)
        there = tuple(org for org in told.orgs if _tag(org.name, org.secret) not in self._purged)
        return msgspec.structs.replace(told, orgs=there)

    @staticmethod
    def _is_other(told: Desired, shim: Shim) -> bool:
        here = shim.desired
        return here is not None and here.generation == told.generation and here != told

    def _restart(self) -> None:
        if self._is_quiet():
            self._start_again(is_upgraded=self.chance.random() < 0.5)

    def _is_quiet(self) -> bool:
        return not (self._delivering or self._busy)

    def _start_again(self, *, is_upgraded: bool) -> None:
        self._busy = True

        def again() -> None:
            self._shim.stop()
            if is_upgraded and self._driver_before:
                self._driver_before = False
                self.seen["a driver was upgraded"] += 1
            self._shim = Shim("job", self._state)
            self._shim.start()
            self.seen["a driver was restarted"] += 1
            self._busy = False

        self._turns.start(again, "restart", self._process)

    def _purge(self) -> None:
        """The org gets another secret, of which the older console does not know. Only a driver of now
        confirms; a purge waits for the others."""
        if not self._is_quiet() or self._driver_before:
            return
        name = self.chance.choice(ORGS)
        tag = _tag(name, _secret(name, self._secrets[name]))
        self._secrets[name] += 1
        self._purged.add(tag)
        self._busy = True

        def bury() -> None:
            self._shim.ban_tags([tag])
            self.seen["a tag was purged"] += 1
            self._busy = False

        self._turns.start(bury, "purge", self._process)

    def _upgrade_console(self) -> None:
        self.seen["the last console was upgraded"] += self._console_before
        self._console_before = False

    def _go_on(self) -> None:
        for _ in range(self.chance.randint(1, 30)):
            if not self._turns.go_on():
                self._turns.pass_time_until_something_is_due(5.0)

    def _until_quiet(self) -> None:
        until = self._turns.now + 1000
        while not self._is_quiet():
            assert self._turns.now < until, "a document is followed for ever"
            self._go_on()
            self._check()

    def _check(self) -> None:
        if self._busy:
            return
        shim = self._shim
        generation = shim.desired.generation if shim.desired else 0
        assert generation >= self._accepted, "it went back to an earlier document"
        if self._delivering or shim.desired is None:
            return
        told = self._expected(self._written[self._accepted - 1])
        assert shim.desired == told
        assert shim.observed_generation == self._accepted
        assert dict(shim._callers) == told.callers(), "somebody's token holds that is not in it"
        stock = shim.driver.ledger._stock
        assert dict(stock._policies) == {org.name: org.policies for org in told.orgs}
        assert homes_of(told) == shim.shards.desired
        left_out = desired.parse(self._written[self._accepted - 1]).orgs != told.orgs
        self.seen["what was purged was left out"] += left_out


def _secret(org: str, number: int) -> bytes:
    return f"{org} {number}".encode().ljust(32, b"!")


def _tag(org: str, secret: bytes) -> str:
    return isolation_tag(org, secret).hex()


def _without_what_is_new(raw: bytes) -> bytes:
    """As the version before writes the same intent."""
    told = msgspec.json.decode(raw)
    told.pop("agents_removed", None)
    told.pop("agents_moved", None)
    told.pop("claims_key", None)
    for org in told.get("orgs", []):
        org.pop("secrets", None)
    for home in told["homes"]:
        if home.get("control"):
            home["control"] = {"url": home["control"]["url"], "token": "t" * 20}
    return msgspec.json.encode(told)


_BEFORE: Final = msgspec.json.Decoder(DesiredBefore)
