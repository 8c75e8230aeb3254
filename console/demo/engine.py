"""An engine that computes nothing: it loads what the driver has of a prompt, compares every byte, and
stores made-up columns for the rest."""

from __future__ import annotations

import logging
import secrets
from typing import Final, NamedTuple

from console.demo.story import Ask
from swdriver_shim.adapters.remote import Prefixes
from swdriver_shim.adapters.wafer import ColumnPart, Speed, Wafer

log = logging.getLogger(__name__)

# A model of this size on accelerators that are not a wafer, so that a cache is worth it.
SPEED: Final = Speed(operations_per_second=1e15)
WAIT_SECONDS: Final = 0.05  # for columns in tier 2


class Done(NamedTuple):
    asked: int  # tokens
    hit: int
    wrong_bytes: int


def serve(prefixes: Prefixes, wafer: Wafer, ask: Ask, request: str = "") -> Done:
    """`request`: how the driver explains it. Raises `remote.Refused`."""
    kv = wafer.kv(ask.tokens)
    places: dict[ColumnPart, bytearray] = {}

    def into(group: int, shard: int, depth: int, tokens: int) -> memoryview:
        part = ColumnPart(group, shard, depth, tokens)
        size = wafer.layout.groups[group].part_bytes(shard, tokens)
        place = places[part] = bytearray(size)
        return memoryview(place)

    request = request or f"demo-{secrets.token_hex(8)}"
    hit = prefixes.load(ask.tokens, into, WAIT_SECONDS, request).tokens
    wrong = sum(kv.wrong_bytes(part, memoryview(places.get(part, b""))) for part in wafer.parts(hit))
    if wrong:
        log.error("%d bytes loaded for %s differ from what was stored", wrong, ask.org)
    computed = len(ask.tokens) - hit
    if computed:
        prefixes.computed(computed, SPEED.compute_seconds(computed, hit))
    kv.extend(ask.answer)
    tokens = [*ask.tokens, *ask.answer]
    states = wafer.states(hit, len(tokens))
    prefixes.store(tokens, len(tokens), kv, request=request, states=states)
    return Done(len(ask.tokens), hit, wrong)
