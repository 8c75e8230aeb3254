"""The verb `replay`: plays a trace against an endpoint with OpenAI's API."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any, Final, get_args
from urllib.parse import urlsplit

from rich.console import Console
from rich.table import Table
from rich.text import Text

from inference_brain.replay import schedule
from inference_brain.replay.outcomes import UNKNOWN
from inference_brain.replay.player import REPLICA_HEADER, Play, Player
from inference_brain.replay.prompts import Form, PromptMaker
from kvss_agent.http.client.client import Client, Timeouts
from swdriver_shim.replay.command_line import (
    Unusable,
    count,
    open_report,
    positive,
    progress,
    read_requests,
    seconds,
    table,
    took,
)
from swdriver_shim.replay.traces import Malformed, Request
from telemetry import units
from telemetry.script import program
from telemetry.units import duration

KEY_VARIABLE: Final = "OPENAI_API_KEY"
AT_ONCE: Final = 256
LATE_SECONDS: Final = 0.05  # from which on times of arrival are not the trace's any more
# Requests are made in a thread beside the loop, which waits no longer than this for Python's lock.
SWITCH_SECONDS: Final = 0.0005
WIDTH: Final = 120  # of tables that nobody looks at in a terminal
DESCRIPTION: Final = """\
Play the requests of a trace against any server with OpenAI's API, and report time to first token, time
between tokens and cache hit rate, in all and by replica. Ctrl-C ends it early and reports what there is.
"""
EXAMPLES: Final = """\
examples:
  %(prog)s conversation.jsonl --url http://127.0.0.1:8000/v1 --model qwen --speed 10
  %(prog)s agent-sessions/ --url https://brain:8443/v1 --model qwen --keys-file keys --form chat
  %(prog)s conversation.jsonl --url http://127.0.0.1:8000/v1 --model qwen --rate 5 --requests 200
"""


def main(arguments: list[str] | None = None) -> int:
    given = _parser().parse_args(sys.argv[1:] if arguments is None else arguments)
    try:
        return _replay(given)
    except (Unusable, Malformed) as error:
        sys.stderr.write(f"{error}\n")
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"{program('inference_brain')} replay",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("trace", type=Path, help="a .jsonl of conversations, a .json of a session, or a folder of those")
    add("--url", type=_url, required=True, help="of the API, with its /v1")
    add("--model", required=True, help="as the server calls it")
    add("--requests", type=count, metavar="N", help="only the first so many")
    add("--json", type=Path, metavar="FILE", help="also write the report there")
    pace = parser.add_argument_group("when requests are sent").add_mutually_exclusive_group()
    pace.add_argument("--speed", type=positive, default=1.0, metavar="X", help="times the trace's (1)")
    pace.add_argument("--rate", type=positive, metavar="N", help="so many a second, instead")
    pace.add_argument("--flat-out", action="store_true", help="as soon as --at-once allows, instead")
    add = parser.add_argument_group("what is sent").add_argument
    add(
        "--at-once",
        type=count,
        default=AT_ONCE,
        metavar="N",
        help=f"requests that are being answered, at most (default: {AT_ONCE}); others wait",
    )
    add(
        "--form",
        choices=get_args(Form),
        default="completions",
        help="text to complete, messages, or token ids, which not every server takes (default: "
        "completions)",
    )
    add(
        "--words-per-token",
        type=positive,
        default=1.0,
        metavar="X",
        help="so that prompts of words are as long as the trace's (default: 1)",
    )
    add("--output-tokens", type=count, metavar="N", help="at most; the trace may ask for more")
    add("--salt", default="", help="another one makes other prompts, which no cache has yet")
    add("--no-stream", action="store_true", help="ask for whole answers: no times between tokens")
    add("--ignore-eos", action="store_true", help="answers are as long as the trace's; for vLLM, SGLang")
    add("--keys-file", type=Path, metavar="FILE", help="API keys, one a line: sessions are dealt out")
    add("--seed", type=int, default=0, help="deals sessions and times out otherwise (default: 0)")
    add("--ca", type=Path, metavar="FILE", help="PEM, whom to believe beside those of the system")
    add(
        "--replica-header",
        default=REPLICA_HEADER,
        metavar="NAME",
        help=f"which header of an answer names its replica (default: {REPLICA_HEADER})",
    )
    add(
        "--timeout",
        type=seconds,
        default=600.0,
        metavar="TIME",
        help="for a first token, or for a whole answer (10m)",
    )
    return parser


def _url(text: str) -> str:
    try:
        parts = urlsplit(text)
        is_address = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        is_address = False
    if not is_address or not text.isascii() or not text.isprintable() or " " in text:
        raise argparse.ArgumentTypeError(f"{text!r} is no address, as http://127.0.0.1:8000/v1")
    return text.rstrip("/")


def _replay(given: argparse.Namespace) -> int:
    requests = read_requests(given.trace, given.requests)
    play = Play(
        given.url,
        _keys(given.keys_file),
        given.at_once,
        not given.no_stream,
        given.output_tokens,
        given.replica_header,
        given.seed,
        {"ignore_eos": True} if given.ignore_eos else None,
    )
    prompts = PromptMaker(given.model, given.form, given.salt, words_per_token=given.words_per_token)
    before = sys.getswitchinterval()
    with open_report(given.json) as report:
        sys.setswitchinterval(SWITCH_SECONDS)
        try:
            made = asyncio.run(_play(given, requests, play, prompts))
        finally:
            sys.setswitchinterval(before)
        if report:
            report.write(json.dumps(made, indent=1) + "\n")
    _show(made)
    return 1 if made["failed"] == made["requests"] else 0


async def _play(
    given: argparse.Namespace, requests: list[Request], play: Play, prompts: PromptMaker
) -> dict[str, Any]:
    try:
        client = Client(Timeouts(first=given.timeout), given.ca)
    except OSError as error:
        raise Unusable(f"{given.ca} can't be read: {error.strerror}.") from error
    player = Player(play, prompts, client)
    if given.flat_out:
        dues = schedule.at_once(requests)
    elif given.rate:
        dues = schedule.by_rate(requests, given.rate, given.seed)
    else:
        dues = schedule.by_trace(requests, given.speed)
    with progress(len(requests), can_fail=True) as advance:
        play_all = player.run(dues, lambda outcome: advance(outcome.why is not None))
        playing = asyncio.ensure_future(play_all)
        asyncio.get_running_loop().add_signal_handler(signal.SIGINT, playing.cancel)
        with contextlib.suppress(asyncio.CancelledError):
            await playing
    await client.close()
    made = player.outcomes.report()
    if given.flat_out:
        made["late_seconds"] = None  # nothing was due at any time
    return made


def _keys(file: Path | None) -> list[str]:
    if file is None:
        key = os.environ.get(KEY_VARIABLE)
        keys = [key] if key else []
    else:
        try:
            keys = [line.strip() for line in file.read_text().splitlines() if line.strip()]
        except (OSError, UnicodeDecodeError) as error:
            raise Unusable(f"{file} can't be read: {error}.") from error
        if not keys:
            raise Unusable(f"There are no keys in {file}.")
    if not all(key.isascii() and key.isprintable() for key in keys):
        raise Unusable(f"A key in {file or KEY_VARIABLE} has signs that keys have not.")
    return keys


# The report


def _show(made: dict[str, Any]) -> None:
    console = Console(highlight=False, width=None if sys.stdout.isatty() else WIDTH)
    rate = made["requests_per_second"] or 0
    console.print(
        f"{made['requests']:,} requests in {made['seconds']:.1f} s, {rate:,.1f} a second, "
        f"{made['failed']:,} failed\n"
    )
    console.print(_table(made))
    for why, times in made["failures"].items():
        console.print(f"Failed {times:,} times: {why}", markup=False)
    late = made["late_seconds"]
    if late and late["p99"] > LATE_SECONDS:
        console.print(
            f"Requests were sent late, {duration(late['p99'])} at p99: more were due than --at-once "
            "allows, or than this machine can send."
        )


def _table(made: dict[str, Any]) -> Table:
    headings = ("requests", "prompt tokens", "hit rate", "first token p50", "p95", "p99", "mean")
    shown = table("replica", *headings, "between tokens p50", "p99")
    rows = made["replicas"].items() if [*made["replicas"]] != [UNKNOWN] else ()
    for name, one in [*rows, ("all", made["all"])]:
        first, between = one["first_token_seconds"], one["between_tokens_seconds"]
        hits = "" if one["hit_rate"] is None else units.shown(one["hit_rate"], "share")
        times = [took(first and first[key]) for key in ("p50", "p95", "p99", "mean")]
        gaps = [took(between and between[key]) for key in ("p50", "p99")]
        shown.add_row(
            Text(name), f"{one['requests']:,}", f"{one['prompt_tokens']:,}", hits, *times, *gaps
        )
    return shown
