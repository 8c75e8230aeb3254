"""What a brain tells the server that brains share, and what it learns from the answer. No I/O.

One question has everything: use of limits, tokens served, and a report of what this brain has in its
places. The server's part is `counters.lua`. Amounts that are added up go out once: what was not
acknowledged is sent again with the same number, which the server counts once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Final

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import astuple

from inference_brain.admission.fair import NOTHING, Told
from inference_brain.admission.limits import Amounts, Grant, LimitTable
from inference_brain.admission.pool import Pool, Report
from inference_brain.admission.share import Asking
from inference_brain.admission.window import Window
from inference_brain.choice.candidates import IDLE, Load
from telemetry.decoder import Count, Limits, Malformed, unpack

ORGS_MAX: Final = 256  # in one question; the others are in the next
BYTES_MAX: Final = 4 << 20

Number = Annotated[float, Meta(ge=-(1 << 53), le=1 << 53)]
Loads = Mapping[str, Mapping[str, Load]]  # by model and replica


class _Granted(Struct, array_like=True, frozen=True):
    may: tuple[Number, Number, Number]
    used: tuple[Number, Number]
    running_elsewhere: Number
    waits: tuple[Number, Number]


class _Model(Struct, array_like=True, frozen=True):
    demand: dict[str, tuple[Count, Count, Annotated[int, Meta(ge=1, le=1_000_000)]]]
    prefilling: Count
    lowest: Number | None


class _Load(Struct, array_like=True, frozen=True):
    waiting_tokens: Number
    running: Count
    waiting: Count
    waiting_pairs: Number
    overdue_seconds: Number


class _Report(Struct, array_like=True, frozen=True):
    name: str
    models: dict[str, _Model]
    loads: dict[str, dict[str, _Load]]


_GRANTS: Final = msgspec.msgpack.Decoder(dict[str, _Granted])
_COUNTERS: Final = msgspec.msgpack.Decoder(dict[str, dict[str, Number]])
_REPORTS: Final = msgspec.msgpack.Decoder(_Report)
_LIMITS: Final = Limits(BYTES_MAX)


class Exchange:
    """Of one brain. `name`: of this process alone, another one after each start."""

    def __init__(
        self,
        name: str,
        limits: LimitTable,
        pools: Mapping[str, Pool],
        loads: Callable[[], Loads] = dict,
    ) -> None:
        self.name = name
        self.limits = limits
        self._pools = pools
        self._loads = loads
        self.elsewhere: dict[tuple[str, str], Load] = {}  # of all others, by model and replica
        self.asked: frozenset[str] = frozenset()  # orgs in the last question
        self._sequence = 0
        self._was_away = False
        self._uses: dict[str, Window] | None = None  # on their way
        self._served: dict[str, dict[str, Told]] = {}

    def question(self, now: float, server_time: float = 0) -> tuple[bytes, bytes]:
        """What the script is given. `server_time`: what it is to take for the time, in simulations."""
        asked = self.limits.to_ask(now, ORGS_MAX)
        if self._uses is None:
            self._sequence += 1
            self._uses = {org: self.limits.take_unsent(org) for org in asked}
            self._served = {model: pool.counters.take_unsent() for model, pool in self._pools.items()}
        orgs = {}
        for org in asked:
            one = self.limits.ask(org, now)
            uses = self._uses.get(org) or Window()
            orgs[org] = (one.limits, _ages(uses, now), one.running, one.needs, one.wants)
        for org in self._uses.keys() - orgs.keys():  # asked for before, in vain
            if org not in self.limits:
                continue
            one = self.limits.ask(org, now)
            orgs[org] = (one.limits, _ages(self._uses[org], now), one.running, one.needs, one.wants)
        self.asked = frozenset(orgs)
        served = {}
        for model, pool in self._pools.items():
            more, counters = self._served.get(model, {}), pool.counters
            if orgs_of_model := {*more, *pool.queue.orgs}:
                # After a pause the server may have lost what it knew.
                served[model] = {
                    org: more.get(org, NOTHING)
                    if not self._was_away
                    else Told(more.get(org, NOTHING).more, counters[org] - more.get(org, NOTHING).more)
                    for org in orgs_of_model
                }
        message = (server_time, self.name, self._sequence, orgs, served)
        return msgspec.msgpack.encode(message), self._report()

    def answered(self, answer: Sequence[int | bytes], now: float) -> None:
        """Take over what the server says. Raises Malformed, and then nothing was taken over."""
        brains, raw_grants, raw_counters, *raw_reports = answer
        if not isinstance(brains, int):
            raise Malformed("The number of brains is no number")
        grants = unpack(_table(raw_grants), _GRANTS, _LIMITS)
        counters = unpack(_table(raw_counters), _COUNTERS, _LIMITS)
        reports = [unpack(_bytes(raw), _REPORTS, _LIMITS) for raw in raw_reports if raw]
        self._uses = None
        self._served = {}
        self._was_away = False
        self.limits.answered(
            {
                org: Grant(Amounts(*one.may), one.used, one.running_elsewhere, one.waits)
                for org, one in grants.items()
            },
            brains,
            now,
        )
        for model, values in counters.items():
            if model in self._pools:
                self._pools[model].counters.merge(values)
        self._take_reports(reports, now)

    def failed(self) -> None:
        """No answer came. What others want is taken to be what it was, until there is one; what they
        have at each replica is not."""
        self._was_away = True
        self.limits.lost()
        self.elsewhere = {}

    def _take_reports(self, reports: Sequence[_Report], now: float) -> None:
        self.elsewhere = {}
        for report in reports:
            for model, replicas in report.loads.items():
                for replica, load in replicas.items():
                    before = self.elsewhere.get((model, replica), IDLE)
                    self.elsewhere[model, replica] = before.plus(Load(*astuple(load)))
        for model, pool in self._pools.items():
            others = {
                report.name: Report(
                    {org: Asking(*asking) for org, asking in one.demand.items()},
                    one.prefilling,
                    one.lowest,
                )
                for report in reports
                if (one := report.models.get(model))
            }
            pool.others_are(self.name, others, now)

    def _report(self) -> bytes:
        models = {}
        for model, pool in self._pools.items():
            if (one := pool.report()).demand:
                models[model] = one
        loads = {
            model: {name: load for name, load in replicas.items() if load != IDLE}
            for model, replicas in self._loads().items()
        }
        return msgspec.msgpack.encode((self.name, models, loads))


def _ages(window: Window, now: float) -> list[float]:
    """As the server counts: never older than it is, so that a minute is never too short."""
    flat: list[float] = []
    for second, (requests, tokens) in window.seconds.items():
        flat += (max(0, int(now) - second - 1), requests, tokens)
    return flat


def _table(value: int | bytes) -> bytes:
    """Lua has one kind of table: an empty one is an empty list."""
    return b"\x80" if value == b"\x90" else _bytes(value)


def _bytes(value: int | bytes) -> bytes:
    if not isinstance(value, bytes):
        raise Malformed("A part of the answer is no text")
    return value
