"""Promotion from tier 2 compared with none: the real ledger, a modeled tier 2, and public traces.

    python -m benchmarks.promotion --quick

A request hits what is in memory, waits for what is in tier 2, and computes the rest; then all of it is
stored. Decisions are those of the driver, by the trace's clock. Tier 2 is a link: one recall after the
other, and a request waits for a batch of promoted columns that is under way. Nothing depends on this
machine. The constants of promotion were chosen on the traces `conversation.first` and `sessions.even`;
the others had no part in that. `grown`: memory is a quarter until the middle of the trace, and only what
comes later is counted. Sessions are replayed with three samples of keys.
"""

from __future__ import annotations

import gc
import hashlib
import statistics
import struct
import sys
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple

from benchmarks.harness import Row, options, percentile, progress, show, traces_folder
from swdriver_shim.adapters.wafer import Speed
from swdriver_shim.cache.ledger import Ledger
from swdriver_shim.cache.recalls import Recall
from swdriver_shim.cache.request_log import HasKeys
from swdriver_shim.cache.spills import Dates
from swdriver_shim.keys import Keys, Named, Namespace
from swdriver_shim.layout import Group, Layout
from swdriver_shim.policy import DisplacementName, OrgPolicies, Policy, Tiers
from swdriver_shim.replay.emulator import TraceClock, run_housekeeping
from swdriver_shim.replay.traces import Malformed, read, sessions

ORG: Final = "acme"
BLOCK: Final = 512  # tokens: a column of the ledger here, so that an hour is replayed in a minute
SPEED: Final = Speed()
BYTES: Final = BLOCK * SPEED.bytes_per_token
LINK: Final = 20e9  # bytes per second that tier 2 gives, of all nodes together
BUDGET: Final = 5e9  # bytes per second of promotion
TIER2: Final = 4  # times as large as memory
ROUND_S: Final = 1.0  # between two rounds of housekeeping that promote
SPILL_COLUMNS: Final = 64
SAMPLES: Final = 3  # of sessions, of which there are few: the median counts
SYNTHETIC: Final = "synthetic_trace.jsonl"  # beside the others or not
SHARES: Final = (0.05, 0.1, 0.2)  # of all blocks of a trace: how many memory has


class Ask(NamedTuple):
    at_s: float
    blocks: Sequence[int]


class Trace(NamedTuple):
    """Requests, of which those from `counted_from` on are counted."""

    name: str
    asks: list[Ask]
    counted_from: float = 0.0
    samples: int = 1


@dataclass
class Counts:
    asked: int = 0  # blocks
    in_memory: int = 0
    in_tier2: int = 0
    recalled: int = 0
    promoted: int = 0
    promoted_used: int = 0
    first_token: list[float] = field(default_factory=list)  # seconds, by the model
    waited: list[float] = field(default_factory=list)  # of those: for tier 2


class Driver:
    """A ledger, and a tier 2 of so many columns. As a driver would, without bytes."""

    def __init__(
        self, slots: int, tier2: int, budget: float, displacement: DisplacementName, sample: int
    ) -> None:
        self._sample = sample
        layout = Layout((Group("full", bytes_per_token=(BYTES // 64,)),))
        self.ledger = Ledger(layout, "m")
        self.ledger.set_slot_limit(0, slots)
        policy = Policy(tiers=Tiers.TIER2, displacement=displacement, ttl_last_use_seconds=None)
        self.ledger.set_policies({ORG: OrgPolicies(policy=policy)}, 0)
        self.ledger.tier2.set_promotion_budget(budget)
        self.promotes = budget > 0
        self.counts: Counts | None = None
        self._keys = Keys(ORG, bytes(32), Namespace("m", "1", "bf16", "full"))
        self._files: OrderedDict[bytes, Dates] = OrderedDict()  # the one that was used longest ago first
        self._files_max = tier2
        self._clock = TraceClock()
        self._link_free_at = 0.0
        self._round_at = 0.0

    def serve(self, ask: Ask) -> None:
        """Promote as time passes, then serve the request."""
        while self.promotes and self._round_at <= ask.at_s:
            self._promote(self._round_at)
            self._round_at += ROUND_S
        self._clock.pass_to(ask.at_s)
        now, ledger = self._clock.now, self.ledger
        prompt = Named(self._keys, [_key(block, self._sample) for block in ask.blocks])
        used_before = ledger.tier2.promoted.used
        match = ledger.match(prompt, now)
        in_memory = recalled = len(match.columns[0])
        used = ledger.tier2.promoted.used - used_before
        waited = 0.0
        if exists := self._search(prompt, in_memory, now):
            recalled = self._recall(ledger.tier2.begin_recalls(prompt, exists, now), now)
            waited = self._transfer(recalled, now)
            match = ledger.rematch(match, now)
        hit = len(match.columns[0])
        ledger.release(match)
        ledger.finish_store(ledger.begin_store(prompt, prompt.tokens, now), now)
        self._keep_house(now)
        if counts := self.counts:
            counts.asked += len(ask.blocks)
            counts.in_memory += in_memory
            counts.in_tier2 += hit - in_memory
            counts.recalled += recalled if waited else 0
            counts.promoted_used += used
            counts.waited.append(waited)
            compute = SPEED.ttft_seconds(BLOCK * len(ask.blocks), BLOCK * hit)
            counts.first_token.append(waited + compute)

    def _promote(self, now: float) -> None:
        """In batches, one after the other, until the next round."""
        tier2, until = self.ledger.tier2, now + ROUND_S
        while self._link_free_at < until:
            at = max(now, self._link_free_at)
            prompt = tier2.next_promotion(at)
            if prompt is None:
                return
            exists = self._search(prompt, tier2.has(prompt, at), at)
            recalls = tier2.begin_promotion(prompt, exists or [set()], at)
            count = self._recall(recalls, at)
            self._transfer(count, at)
            tier2.hold_promoted(recalls, at)
            if self.counts:
                self.counts.promoted += count
            self._keep_house(at)

    def _search(self, prompt: HasKeys, start: int, now: float) -> list[set[int]]:
        """What tier 2 has; empty for nothing."""
        search = self.ledger.tier2.search(prompt, start, now)
        if search is None:
            return []
        try:
            question = next(search)
            while True:
                question = search.send(
                    {
                        group: {depth for depth in depths if prompt.keys[depth] in self._files}
                        for group, depths in question.items()
                    }
                )
        except StopIteration as ended:
            exists: list[set[int]] = ended.value
            return exists if any(exists) else []

    def _recall(self, recalls: Sequence[Recall], now: float) -> int:
        tier2, count = self.ledger.tier2, 0
        for recall in recalls:
            tier2.start_recall(recall, now)
            for column, _ in recall.places:
                self._files.move_to_end(column.key)
            found = {column: self._files[column.key] for column, _ in recall.places}
            tier2.finish_recall(recall, now, found)
            count += len(found)
        return count

    def _transfer(self, columns: int, now: float) -> float:
        """How long until so many columns have come over the link."""
        if columns:
            self._link_free_at = max(self._link_free_at, now) + columns * BYTES / LINK
            return self._link_free_at - now
        return 0.0

    def _keep_house(self, now: float) -> None:
        run_housekeeping(self.ledger, now)
        while spill := self.ledger.tier2.begin_spill(now, SPILL_COLUMNS):
            for copy in spill.copies:
                self._files[copy.key] = copy.dates
                self._files.move_to_end(copy.key)
            while len(self._files) > self._files_max:
                self._files.popitem(last=False)
            self.ledger.tier2.finish_spill(spill, [True] * len(spill.copies))


def _key(block: int, sample: int) -> bytes:
    """The displacement policy learns from a sample of keys: others make another sample."""
    made = hashlib.blake2b(struct.pack("<Q", block), digest_size=16, salt=struct.pack("<Q", sample))
    return made.digest()


def replay(
    trace: Trace, slots: int, budget: float, *, grown: bool, displacement: DisplacementName, sample: int
) -> Counts:
    driver = Driver(slots // 4 if grown else slots, TIER2 * slots, budget, displacement, sample)
    middle = trace.asks[len(trace.asks) // 2].at_s if grown else 0.0
    for ask in trace.asks:
        if driver.counts is None and ask.at_s >= max(middle, trace.counted_from):
            driver.counts = Counts()
            driver.ledger.set_slot_limit(0, slots)
        driver.serve(ask)
    gc.collect()
    assert driver.counts
    return driver.counts


def traces(folder: Path) -> tuple[list[Trace], list[Trace]]:
    """Those that promotion was tuned on, and the others."""
    talks = [
        Ask(request.at_s, request.blocks[: request.whole_blocks])
        for request in read(folder / "conversation.jsonl")
        if request.whole_blocks
    ]
    middle = talks[-1].at_s / 2
    first = [ask for ask in talks if ask.at_s < middle]
    tuned, judged = [Trace("conversation.first", first)], [Trace("conversation.second", talks, middle)]
    files = sorted((folder / "agent-sessions").glob("*.json"))
    for name, into, some in (("even", tuned, files[::2]), ("odd", judged, files[1::2])):
        step = BLOCK // 64
        asks = [
            Ask(request.at_s, request.blocks[: request.whole_blocks][step - 1 :: step])
            for request in sessions(some)
        ]
        into.append(Trace(f"sessions.{name}", [ask for ask in asks if ask.blocks], samples=SAMPLES))
    if (folder / SYNTHETIC).exists():
        asks = [
            Ask(request.at_s, request.blocks[: request.whole_blocks])
            for request in read(folder / SYNTHETIC)
            if request.whole_blocks
        ]
        judged.append(Trace("synthetic", asks))
    return tuned, judged


def compared(trace: Trace, share: float, *, grown: bool, displacement: DisplacementName) -> list[Row]:
    slots = int(share * len(set().union(*(ask.blocks for ask in trace.asks))))
    kind = f"{trace.name}.{share:.0%}" + (".grown" if grown else "")
    progress(f"{kind}: {slots:,} blocks of memory, {displacement}")
    name = f"promotion.{kind}" + ("" if displacement == "default" else f".{displacement}")
    before, after = (
        [
            replay(trace, slots, budget, grown=grown, displacement=displacement, sample=sample)
            for sample in range(trace.samples)
        ]
        for budget in (0.0, BUDGET)
    )

    def row(what: str, unit: str, of: Callable[[Counts], float], sign: int = 0) -> Row:
        was, value = (statistics.median(map(of, some)) for some in (before, after))
        ratio = (value / was) ** sign if sign and was and value else None
        return Row(f"{name}.{what}", value, unit, f"none: {was:.2f}", ratio)

    return [
        row("in_memory", "%", lambda one: 100 * one.in_memory / one.asked, 1),
        row("in_tier2", "%", lambda one: 100 * one.in_tier2 / one.asked),
        row("waited", "ms", lambda one: 1e3 * statistics.mean(one.waited), -1),
        row("waited.p95", "ms", lambda one: 1e3 * percentile(one.waited, 0.95), -1),
        row("first_token", "ms", lambda one: 1e3 * statistics.mean(one.first_token), -1),
        row("recalled", "TB", lambda one: one.recalled * BYTES / 1e12),
        row("promoted", "TB", lambda one: one.promoted * BYTES / 1e12),
        row("used", "% of promoted", lambda one: 100 * one.promoted_used / max(1, one.promoted)),
    ]


def main() -> int:
    given = options(__doc__)
    try:
        tuned, judged = traces(traces_folder())
    except (OSError, Malformed) as error:
        print(f"No traces: {error}. Say where they are: TRACES_DIR.", file=sys.stderr)
        return 1
    gc.disable()  # it would look through all columns again and again
    rows: list[Row] = []
    for trace in [*tuned, *judged]:
        if given.quick and trace.name not in ("sessions.even", "sessions.odd"):
            continue
        for share in SHARES[1:2] if given.quick else SHARES:
            rows += compared(trace, share, grown=False, displacement="default")
        if not given.quick:
            rows += compared(trace, SHARES[1], grown=False, displacement="lru")
            rows += compared(trace, SHARES[1], grown=True, displacement="default")
    show("Promotion", rows, given.json)
    ratios = {
        which: [row.ratio for trace in some for row in rows if _is_judged(row, trace)]
        for which, some in (("tuned", tuned), ("judged", judged))
    }
    for which, some in ratios.items():
        found = [ratio for ratio in some if ratio]
        if found:
            print(
                f"\nFirst token, {which}: none / promotion {statistics.median(found):.3f} (median); "
                f"{sum(one > 1.001 for one in found)} better, {sum(one < 0.999 for one in found)} "
                f"worse of {len(found)}"
            )
    return 0


def _is_judged(row: Row, trace: Trace) -> bool:
    return row.id.startswith(f"promotion.{trace.name}.") and row.id.endswith(".first_token")


if __name__ == "__main__":
    sys.exit(main())
