"""`python -m swdriver_shim replay`: a trace through an emulated engine. See `--help`."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, get_args

from rich.console import Console
from rich.table import Table

from kvss_agent.client import Address, Credentials
from swdriver_shim.adapters.wafer import (
    STATE_TOKENS,
    DriverCache,
    Emulator,
    LedgerCache,
    Wafer,
    wafer_layout,
)
from swdriver_shim.cache.ledger import Ledger
from swdriver_shim.driver import Driver
from swdriver_shim.layout import Layout
from swdriver_shim.policy import DisplacementName, OrgPolicies, Policy, Tiers
from swdriver_shim.replay import fleet
from swdriver_shim.replay.command_line import (
    Unusable,
    count,
    open_report,
    positive,
    progress,
    read_requests,
    seconds,
    size,
    table,
    took,
)
from swdriver_shim.replay.emulator import Orgs, TraceClock, replay, report, run_housekeeping
from swdriver_shim.replay.traces import Malformed, Request
from telemetry import units
from telemetry.metrics import words_of
from telemetry.script import program
from telemetry.units import duration

SLOTS_METADATA: Final = 250_000
SLOTS_BYTES: Final = 4_096
WAIT_SECONDS: Final = 1.0
INTERRUPTED: Final = 130
WIDTH: Final = 100  # of tables that nobody looks at in a terminal
DESCRIPTION: Final = """\
Serve the requests of a trace through an emulated engine, and say what the cache did: hit rates, reasons
of misses, bytes, latencies, and how much sooner first tokens come. Without --metadata or --agent, agents
are started for it. Ctrl-C ends it early and shows what there is.
"""
EXAMPLES: Final = """\
examples:
  %(prog)s conversation.jsonl --metadata
  %(prog)s conversation.jsonl --requests 500 --scale 4KiB --json report.json
  %(prog)s agent-sessions/ --speed 60 --orgs 6
  %(prog)s conversation.jsonl --slots 1000 --tier2 20GB
  %(prog)s conversation.jsonl --agent unix:.kvss/data.sock --secret-file secret
"""


def main(arguments: list[str]) -> int:
    given = _parser().parse_args(arguments)
    try:
        _replay(given)
    except (Unusable, Malformed, fleet.NoAgent) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    except KeyboardInterrupt:  # before the first request, or again at the end
        return INTERRUPTED
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"{program('swdriver_shim')} replay",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("trace", type=Path, help="a .jsonl of conversations, a .json of a session, or a folder of those")
    add("--requests", type=count, metavar="N", help="only the first so many")
    add("--speed", type=positive, metavar="X", help="1 is real time (default: as fast as it goes)")
    add("--orgs", type=count, default=4, metavar="N", help="how many share the cache (default: 4)")
    names = get_args(DisplacementName)
    add(
        "--displacement",
        choices=names,
        default="default",
        help="which columns are displaced to make room (default: %(default)s)",
    )
    add("--seed", type=int, default=0, help="another one deals sessions out to other orgs (default: 0)")
    add("--json", type=Path, metavar="FILE", help="also write the report there")
    where = parser.add_argument_group("where to").add_mutually_exclusive_group()
    where.add_argument(
        "--metadata",
        action="store_true",
        help="decide everything and move nothing: no agents, and the clock is the trace's",
    )
    where.add_argument(
        "--agent",
        metavar="ADDRESS",
        help="of an agent that runs, such as unix:.kvss/data.sock; it has shards DRIVER.full.0 and on",
    )
    add = parser.add_argument_group("of agents").add_argument
    add("--agents", type=count, default=2, metavar="N", help="how many are started (default: 2)")
    add(
        "--tier2",
        type=size,
        metavar="SIZE",
        help="keep what memory has no room for on disk, so much of it at each agent",
    )
    add(
        "--wait",
        type=seconds,
        default=WAIT_SECONDS,
        metavar="TIME",
        help=f"for what is in tier 2, at most (default: {duration(WAIT_SECONDS)})",
    )
    add("--driver", default=fleet.DRIVER, help="as whom to connect to --agent (default: replay)")
    add("--secret-file", type=Path, metavar="FILE", help="the driver's secret, as it is, for --agent")
    add = parser.add_argument_group("the model's KV").add_argument
    add(
        "--slots",
        type=count,
        metavar="N",
        help=f"columns that fit (default: {SLOTS_METADATA} with --metadata, else {SLOTS_BYTES})",
    )
    add("--scale", type=size, default=1024, metavar="SIZE", help="per token in all (default: 1KiB)")
    add("--boxes", type=count, default=1, metavar="N", help="of four domains each (default: 1)")
    add("--window", type=count, metavar="TOKENS", help="half of it is of layers with such a window")
    add("--draft", action="store_true", help="a sixteenth of it is a draft model's")
    add("--state", type=size, metavar="SIZE", help="of a state group besides, for each state")
    add(
        "--state-every",
        type=count,
        default=STATE_TOKENS,
        metavar="TOKENS",
        help=f"between two states that are stored (default: {STATE_TOKENS})",
    )
    return parser


# Replay


def _replay(given: argparse.Namespace) -> None:
    requests = read_requests(given.trace, given.requests)
    try:
        layout = wafer_layout(
            given.boxes,
            given.scale,
            window_tokens=given.window,
            draft=given.draft,
            state_bytes=given.state or 0,
            tokens_per_state=given.state_every,
        )
    except ValueError as error:
        sizes = f"{given.scale} bytes per token"
        sizes += f" and {given.state} per state" if given.state else ""
        raise Unusable(f"{sizes} are too few for this layout: {error}.") from error
    wafer = Wafer(layout)
    orgs = Orgs(given.orgs, given.seed, wafer.namespace)
    tiers = Tiers.TIER2 if given.tier2 else Tiers.DRAM
    policies = OrgPolicies(policy=Policy(displacement=given.displacement, tiers=tiers))
    with open_report(given.json) as report_file:
        with (
            _serving(given, wafer) as (emulator, ledger, before_each),
            progress(len(requests)) as advance,
        ):

            def before(request: Request) -> None:
                before_each(request)
                advance(False)

            ledger.set_policies(dict.fromkeys(orgs.names, policies), 0)  # before anything is stored
            totals = replay(requests, emulator, orgs, before, speed=given.speed)
            tallies = {org: ledger.tally(org) for org in orgs.names}
        made = report(totals, tallies)
        if report_file:
            report_file.write(json.dumps(made, indent=1) + "\n")
    _show(made)
    if totals.wrong_bytes:
        raise Unusable(f"{totals.wrong_bytes} bytes came back wrong.")


Serving = tuple[Emulator, Ledger, Callable[[Request], None]]


@contextlib.contextmanager
def _serving(given: argparse.Namespace, wafer: Wafer) -> Iterator[Serving]:
    """An emulator, the ledger that counts for it, and what is to be done before each request."""
    if given.metadata:
        yield _in_numbers(wafer, given.slots or SLOTS_METADATA)
        return
    with _shards(given, wafer.layout) as shards:
        driver = Driver(wafer.layout, wafer.namespace.model, shards)
        try:
            wait = given.wait if given.tier2 else 0.0
            yield Emulator(DriverCache(driver, wafer, wait)), driver.ledger, lambda _: None
        finally:
            driver.close()


def _in_numbers(wafer: Wafer, columns: int) -> Serving:
    ledger, clock = Ledger(wafer.layout), TraceClock()
    for index, group in enumerate(wafer.layout.groups):
        ledger.set_slot_limit(index, group.slots_of(columns))

    first_s: float | None = None  # traces may count from 1970, and a column has seconds below 2**31

    def pass_time(request: Request) -> None:
        nonlocal first_s
        if first_s is None:
            first_s = request.at_s
        clock.pass_to(request.at_s - first_s)
        run_housekeeping(ledger, clock.now)

    return Emulator(LedgerCache(ledger, wafer, clock)), ledger, pass_time


@contextlib.contextmanager
def _shards(given: argparse.Namespace, layout: Layout) -> Iterator[fleet.Shards]:
    if given.agent is None:
        slots = given.slots or SLOTS_BYTES
        with fleet.started(layout, slots, given.agents, given.tier2 or 0) as agents:
            yield agents.shards()
        return
    if given.secret_file is None:
        raise Unusable("--agent needs --secret-file: the secret that the agent knows the driver by.")
    try:
        Address.parse(given.agent)
        secret = given.secret_file.read_bytes()
    except ValueError as error:
        raise Unusable(f"{given.agent} is no address: {error}.") from error
    except OSError as error:
        raise Unusable(f"{given.secret_file} can't be read: {error.strerror}.") from error
    yield fleet.at(given.agent, layout, Credentials(given.driver, secret))


# The report


def _show(made: dict[str, Any]) -> None:
    console = Console(highlight=False, width=None if sys.stdout.isatty() else WIDTH)
    rate = made["requests_per_second"] or 0
    console.print(f"{made['requests']:,} requests in {made['seconds']:.1f} s, {rate:,.0f} a second\n")
    for one in (_table_of_orgs(made), _table_of_misses(made), _table_of_moves(made)):
        console.print(one)
    ttft = made["ttft"]
    if ttft["gain"] is not None:
        console.print(
            f"First token, by the model: {took(ttft['mean_seconds'])} on average, "
            f"{took(ttft['mean_seconds_without_cache'])} without a cache: "
            f"{units.shown(ttft['gain'], 'share')} sooner"
        )
    console.print(f"Wrong bytes: {made['wrong_bytes']}")


def _table_of_orgs(made: dict[str, Any]) -> Table:
    tiers = sorted({tier for org in made["orgs"].values() for tier in org["hit_tokens"]})
    headings = ["requests", "tokens asked", *(f"hit in {words_of(tier)}" for tier in tiers), "hit rate"]
    shown = table("org", *headings)
    for name, org in [*made["orgs"].items(), ("all", made["all"])]:
        asked = org["requested_tokens"]
        rates = [_share(org["hit_tokens"].get(tier, 0), asked) for tier in tiers]
        shown.add_row(name, f"{org['requests']:,}", f"{asked:,}", *rates, _percent(org["hit_rate"]))
    return shown


def _table_of_misses(made: dict[str, Any]) -> Table:
    shown = table("missed because", "tokens", "of those asked for")
    for reason, tokens in made["all"]["missed_tokens"].items():
        shown.add_row(words_of(reason), f"{tokens:,}", _share(tokens, made["all"]["requested_tokens"]))
    return shown


def _table_of_moves(made: dict[str, Any]) -> Table:
    shown = table("moved", "bytes", "GB/s", "p50", "p90", "p99")
    for name, kind in (("in (load)", "load"), ("out (store)", "store")):
        moved = made[kind]
        speed = moved["gigabytes_per_second"]
        times = [took(moved[f"{quantile}_seconds"]) for quantile in ("p50", "p90", "p99")]
        shown.add_row(name, f"{moved['bytes']:,}", "" if speed is None else f"{speed:.2f}", *times)
    return shown


def _share(part: int, of: int) -> str:
    return _percent(part / of if of else None)


def _percent(rate: float | None) -> str:
    return "no traffic" if rate is None else units.shown(rate, "share")
