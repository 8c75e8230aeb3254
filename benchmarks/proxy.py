"""What a brain adds to a request, and how many it carries: beside Envoy, others' routers and no proxy.

    make bench NAME=proxy ARGS="--quick --json rows.json"

Each proxy has one processor of its own, the engine and the clients share another. All are measured in
turns, several times: a row is the median of its rounds, and so is its ratio, of which both sides belong
to the same round. The engine answers at once, so everything that is measured is the proxy's.

`proxy.rps.*`: bodies of 2 KB and 200 KB, 16 connections that never pause, a model without a tokenizer.
`proxy.cpu.*`: processor time of the proxy for each of those requests. `stream.*`: many streams at once.
`picker.*`: the same requests through an Envoy that asks a brain where to send them.
`route.added.*`: chats of 2,048 and 32,768 tokens, which the brain tokenizes, at 70 % of the peak rate;
what they take longer than without a proxy. `busy %`: the part of the time that the brain has run in;
`waited %`: that its main thread could have run in, and did not. Where that is more than next to nothing,
the row is the machine's: take `--real-time`, or a machine without other work. `peak waited %`: the same
while the peak rate was looked for, which is so much too low then. With `--real-time` that is up to 5 %,
since the system holds up a real-time process that never rests for 50 ms of each second
(`kernel.sched_rt_runtime_us`).
`route.cpu.*`: processor time of the brain for such a request.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from benchmarks import proxies
from benchmarks.harness import Row, parser, percentile, progress, show
from benchmarks.proxies import OTHER_CPU, Absent, Running, pinned
from console.environment import PROJECT
from inference_brain.tokens.messages import Chat
from inference_brain.tokens.tokenizer import PromptTokenizer, load

CONNECTIONS: Final = 16
SIZES: Final = {"2k": 2_000, "200k": 200_000}
GOAL: Final = 0.8  # of Envoy
ADDED_SECONDS_MAX: Final = 0.005
LOAD: Final = 0.7  # of the peak rate
STREAMS, EVENTS, INTERVAL = 100, 100, 0.02
BUSY_STREAMS, BUSY_INTERVAL = 64, 0.002
CONVERSATIONS: Final = 16
TURN_WORDS: Final = 250
PROMPTS: Final = {"2k": 2_048, "32k": 32_768}  # tokens
CHAT: Final = "/v1/chat/completions"
WORDS: Final = [
    "the", "of", "and", "to", "in", "is", "you", "that", "it", "was",
    "for", "on", "are", "as", "with", "his", "they", "at", "be", "this",
]  # fmt: skip


@dataclass(frozen=True)
class Lengths:
    """Seconds of each measurement, and how many rounds there are."""

    rounds: int
    closed: float
    streams: float
    paced: float


QUICK: Final = Lengths(3, 0.8, 2.0, 3.0)
FULL: Final = Lengths(7, 3.0, 6.0, 10.0)


def play(target: Running, seconds: float, bodies: Sequence[str], **more: Any) -> dict[str, Any]:
    """A load in a process of its own. Raises RuntimeError with what it has said."""
    load = {"port": target.port, "seconds": seconds, "bodies": list(bodies), **more}
    command = pinned(OTHER_CPU, [sys.executable, "-m", "benchmarks.proxy_wire", "load"])
    before, waited = target.cpu_seconds(), target.waited_seconds()
    done = subprocess.run(
        command, input=json.dumps(load), capture_output=True, text=True, cwd=PROJECT, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{target.name}: {done.stderr[-500:]}")
    told: dict[str, Any] = json.loads(done.stdout)
    told["cpu"] = target.cpu_seconds() - before
    told["waited"] = target.waited_seconds() - waited
    return told


def body(size: int, **more: object) -> str:
    empty = json.dumps({"model": "m", "prompt": "@@@@@@@@ ", "max_tokens": 100, **more})
    return json.dumps(
        {"model": "m", "max_tokens": 100, **more, "prompt": "@@@@@@@@ " + "x" * (size - len(empty))}
    )


class Figures:
    """Of one measurement, by proxy and round."""

    def __init__(self) -> None:
        self.of: dict[str, list[float]] = {}

    def add(self, name: str, value: float) -> None:
        self.of.setdefault(name, []).append(value)

    def median(self, name: str) -> float:
        return statistics.median(self.of[name])

    def ratio(self, ours: str, other: str) -> float:
        """The median of the rounds' ratios."""
        pairs = zip(self.of[ours], self.of[other], strict=True)
        return statistics.median(one / two for one, two in pairs)

    def row(
        self, name: str, unit: str, pair: tuple[str, str], goal: float | None = None, *more: str
    ) -> Row:
        """One proxy beside another. More is better, but of what takes time (`µs`)."""
        ours, other = pair
        ratio = self.ratio(other, ours) if unit == "µs" else self.ratio(ours, other)
        further = {one: self.median(one) for one in (other, *more)}
        return Row(name, self.median(ours), unit, other, ratio, goal, further)


def carried(proxies_: Sequence[Running], lengths: Lengths) -> Iterator[Row]:
    """`proxy.rps.*` and `proxy.cpu.*`."""
    for label, size in SIZES.items():
        rates, costs = Figures(), Figures()
        for number in range(lengths.rounds):
            progress(f"bodies of {size:,} bytes, round {number + 1}")
            for one in proxies_:
                told = play(one, lengths.closed, [body(size)], connections=CONNECTIONS)
                rates.add(one.name, told["rps"])
                if one.processes:
                    costs.add(one.name, told["cpu"] / told["requests"] * 1e6)
        # Envoy that asks a brain, beside one that asks nobody. Both processes are counted.
        asked = ("gateway", "envoy")
        yield rates.row(f"picker.rps.{label}", "requests/s", asked, None, "brain")
        yield costs.row(f"picker.cpu.{label}", "µs", asked, None, "brain")
        for one in proxies_[1:]:
            if one.name in ("brain", "gateway"):
                continue
            goal = GOAL if one.name == "envoy" else 1.0
            suffix = "" if one.name == "envoy" else f".{one.name}"
            pair = ("brain", one.name)
            yield rates.row(f"proxy.rps.{label}{suffix}", "requests/s", pair, goal, "direct")
            yield costs.row(f"proxy.cpu.{label}{suffix}", "µs", pair)


def streamed(busy: Sequence[Running], calm: Sequence[Running], lengths: Lengths) -> Iterator[Row]:
    """`stream.*`: `busy` ones before an engine that sends as fast as it can, `calm` before one that has
    all events in time."""
    rates, costs, delays = Figures(), Figures(), {0.5: Figures(), 0.99: Figures()}
    asked = [body(2_000, stream=True)]
    for number in range(lengths.rounds):
        progress(f"streams, round {number + 1}")
        for one in busy:
            told = play(one, lengths.streams, asked, connections=BUSY_STREAMS)
            rates.add(one.name, told["chunks"] / told["seconds"])
            costs.add(one.name, told["cpu"] / told["chunks"] * 1e6)
        for one in calm:
            told = play(one, lengths.streams, asked, connections=STREAMS)
            for share, figures in delays.items():
                figures.add(one.name, percentile(told["delays"], share) * 1e6)
    yield rates.row("stream.chunks", "chunks/s", ("brain", "envoy"), GOAL)
    yield costs.row("stream.cpu", "µs", ("brain", "envoy"))
    for share, figures in delays.items():
        ours, theirs, without = (figures.median(name) for name in ("brain", "envoy", "direct"))
        yield Row(
            f"stream.delay.p{share * 100:.0f}",
            ours - without,
            "µs",
            "envoy",
            max(theirs - without, 1.0) / max(ours - without, 1.0),
            None,
            {"envoy": theirs - without, "direct": without},
        )


def conversation(number: int, words: int) -> list[dict[str, str]]:
    """A chat of so many words, in messages of as many each, and a last message of its own."""
    chosen = [WORDS[(number * 7 + at + at * (at % 5 + 1)) % len(WORDS)] for at in range(words)]
    messages = [{"role": "system", "content": f"You are assistant number {number}."}]
    for turn, first in enumerate(range(0, words, TURN_WORDS)):
        role = "assistant" if turn % 2 else "user"
        messages.append({"role": role, "content": " ".join(chosen[first : first + TURN_WORDS])})
    return [*messages, {"role": "user", "content": "What is @@@@@@@@?"}]


def conversations(tokens: int, tokenizer: PromptTokenizer) -> list[str]:
    """Chats of so many tokens, or a few less; each request has another last message."""

    def tokens_of(number: int, words: int) -> int:
        return len(tokenizer.chat(Chat(conversation(number, words))))

    made = []
    for number in range(CONVERSATIONS):
        words = bisect_right(range(tokens), tokens, key=partial(tokens_of, number)) - 1
        made.append({"model": "m", "messages": conversation(number, words), "max_tokens": 100})
    return [json.dumps(one) for one in made]


def added(direct: Running, brain: Running, folder: Path, lengths: Lengths) -> Iterator[Row]:
    """`route.added.*` and `route.cpu.*`. `folder`: of the tokenizer that the brain has."""
    for label, tokens in PROMPTS.items():
        asked = conversations(tokens, load(folder))
        figures = {0.5: Figures(), 0.99: Figures()}
        peaks, costs, times = Figures(), Figures(), Figures()
        chat: dict[str, Any] = {"bodies": asked, "path": CHAT}
        play(brain, lengths.closed, connections=CONNECTIONS, **chat)  # its caches are filled
        for number in range(lengths.rounds):
            progress(f"prompts of {tokens:,} tokens, round {number + 1}")
            busy = play(brain, lengths.closed, connections=CONNECTIONS, **chat)
            peak = busy["rps"]
            peaks.add("brain", peak)
            costs.add("brain", busy["cpu"] / busy["requests"] * 1e6)
            times.add("peak waited %", 100 * busy["waited"] / busy["seconds"])
            for one in (direct, brain):
                told = play(
                    one,
                    lengths.paced,
                    connections=CONNECTIONS * 8,
                    rate=peak * LOAD,
                    seed=number,
                    **chat,
                )
                for share, by in figures.items():
                    by.add(one.name, percentile(told["took"], share))
            times.add("busy %", 100 * told["cpu"] / told["seconds"])
            times.add("waited %", 100 * told["waited"] / told["seconds"])
        shares = {name: times.median(name) for name in times.of}
        shares = {name: value for name, value in shares.items() if not math.isnan(value)}
        yield Row(f"route.cpu.{label}", costs.median("brain"), "µs")
        for share, by in figures.items():
            pairs = zip(by.of["brain"], by.of["direct"], strict=True)
            value = statistics.median(ours - alone for ours, alone in pairs)
            is_tail = share > 0.5
            yield Row(
                f"route.added.p{share * 100:.0f}.{label}",
                value * 1e3,
                "ms",
                f"{ADDED_SECONDS_MAX * 1e3:g} ms" if is_tail else "",
                ADDED_SECONDS_MAX / max(value, 1e-6) if is_tail else None,
                1.0 if is_tail else None,
                {
                    "peak_rps": peaks.median("brain"),
                    "direct_us": by.median("direct") * 1e6,
                    **shares,
                },
            )


def tokenizer(folder: Path) -> Path:
    """Of the shape that many models have, with a chat template."""
    from tests.inference_brain.chat_shapes import write_folder

    return write_folder("llama3", folder)


def carried_rows(scratch: Path, lengths: Lengths) -> Iterator[Row]:
    with contextlib.ExitStack() as opened:
        enter = opened.enter_context
        progress("starting")
        engine = enter(proxies.engine(scratch, EVENTS, INTERVAL))
        direct = Running("direct", engine.port)
        ours = enter(proxies.brain(scratch, [engine.port]))
        floor = enter(proxies.envoy(scratch, engine.port))
        picked = enter(proxies.gateway(scratch, engine.port))
        compared = [direct, ours, floor, picked, *_others(enter, scratch, engine.port)]
        yield from carried(compared, lengths)


def streamed_rows(scratch: Path, lengths: Lengths) -> Iterator[Row]:
    with contextlib.ExitStack() as opened:
        enter = opened.enter_context
        fast = enter(proxies.engine(scratch, EVENTS * 20, BUSY_INTERVAL))
        calm = enter(proxies.engine(scratch, EVENTS, INTERVAL))
        direct = Running("direct", calm.port)
        yield from streamed(
            [enter(make(scratch, fast.port)) for make in (_brain, proxies.envoy)],
            [direct, *(enter(make(scratch, calm.port)) for make in (_brain, proxies.envoy))],
            lengths,
        )


def added_rows(scratch: Path, lengths: Lengths) -> Iterator[Row]:
    with contextlib.ExitStack() as opened:
        enter = opened.enter_context
        engine = enter(proxies.engine(scratch, EVENTS, INTERVAL))
        folder = tokenizer(scratch / "tokenizer")
        ours = enter(proxies.brain(scratch, [engine.port], str(folder)))
        yield from added(Running("direct", engine.port), ours, folder, lengths)


PARTS: Final = {"proxy": carried_rows, "stream": streamed_rows, "route": added_rows}


def main() -> None:
    to_tell = parser(__doc__)
    to_tell.add_argument("--part", choices=PARTS, action="append", help="only these rows")
    to_tell.add_argument(
        "--real-time", action="store_true", help="let no other process interrupt them; needs root"
    )
    given = to_tell.parse_args()
    if given.real_time:  # all that is started from here on inherits it
        try:
            os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
        except PermissionError:
            to_tell.error("--real-time needs root, or CAP_SYS_NICE")
    lengths = QUICK if given.quick else FULL
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="tidegate-bench-") as directory:
        scratch = Path(directory)
        for part in given.part or PARTS:
            rows += PARTS[part](scratch, lengths)
    show("Proxying", rows, given.json)


def _brain(scratch: Path, port: int) -> contextlib.AbstractContextManager[Running]:
    return proxies.brain(scratch, [port])


def _others(
    enter: Callable[[contextlib.AbstractContextManager[Running]], Running], scratch: Path, port: int
) -> Iterator[Running]:
    for name in proxies.OTHERS:
        try:
            yield enter(proxies.router(name, scratch, port))
        except Absent as why:
            progress(str(why))


if __name__ == "__main__":
    main()
