"""Replays of traces: the numbers add up, with and without bytes, and mistakes are told in a sentence."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import OrderedDict
from collections.abc import Collection, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any, Final

import psutil
import pytest

from benchmarks.harness import traces_folder
from kvss_agent.client import Credentials
from swdriver_shim.__main__ import main
from swdriver_shim.adapters.wafer import DriverCache, Emulator, Wafer, wafer_layout
from swdriver_shim.cache.reasons import Reason, Tally
from swdriver_shim.driver import Driver
from swdriver_shim.keys import COLUMN_TOKENS, Keys
from swdriver_shim.replay import fleet
from swdriver_shim.replay.command_line import seconds, size
from swdriver_shim.replay.emulator import Totals, TraceClock, output_tokens, prompt_tokens, report
from swdriver_shim.replay.traces import Request, conversations, tenant
from tests.kvss_agent.plane import SECRET
from tests.kvss_agent.process import agent, document, spec
from tests.live import wait_until

BLOCK = 512


def asked(at: int, blocks: Sequence[int], *, tokens: int | None = None, out: int = 10) -> dict[str, Any]:
    length = len(blocks) * BLOCK if tokens is None else tokens
    return {"timestamp": at, "input_length": length, "output_length": out, "hash_ids": list(blocks)}


# One system prompt; two conversations, the first with three turns.
TRACE = [
    asked(0, [0, 1]),
    asked(0, [0, 2, 3]),
    asked(1000, [0, 1, 4]),
    asked(2000, [0, 1, 4, 5], tokens=3 * BLOCK + 100),
]
ASKED = (2 + 3 + 3) * BLOCK + 3 * BLOCK + 100


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return written(tmp_path, TRACE)


def written(directory: Path, requests: Sequence[dict[str, Any]]) -> Path:
    path = directory / "trace.jsonl"
    path.write_text("".join(f"{json.dumps(request)}\n" for request in requests))
    return path


def replayed(trace: Path, *options: str) -> dict[str, Any]:
    file = trace.parent / "report.json"
    assert main(["replay", str(trace), "--json", str(file), *options]) == 0
    found: dict[str, Any] = json.loads(file.read_text())
    return found


def test_requests_of_one_moment_come_one_after_the_other() -> None:
    clock = TraceClock()
    moments = []
    for at_s in (3.0, 3.0, 3.0, 4.0):
        clock.pass_to(at_s)
        moments.append(clock())
    assert sorted(set(moments)) == moments
    assert moments == pytest.approx([3.0, 3.0, 3.0, 4.0], abs=1e-3)


def request(blocks: tuple[int, ...], tokens: int, block_tokens: int = BLOCK) -> Request:
    return Request(0, "s", blocks, block_tokens, tokens, 30, "made up")


# Tokens


def test_equal_blocks_have_equal_tokens_in_any_request() -> None:
    one, other = prompt_tokens(request((7, 8), 1000), 1), prompt_tokens(request((7, 9), 1024), 2)
    assert (len(one), len(other)) == (4000, 4096)
    assert one[: 4 * BLOCK] == other[: 4 * BLOCK]
    assert one[4 * BLOCK :][:8] != other[4 * BLOCK :][:8]


def test_tokens_that_no_block_names_are_like_no_others() -> None:
    one, other = (prompt_tokens(request((7,), 70, 64), number) for number in (1, 2))
    assert len(one) == len(other) == 280
    assert one[:256] == other[:256]
    assert one[256:] != other[256:]
    assert len(output_tokens(request((), 0), 1)) == 120
    assert output_tokens(request((), 0), 1) != output_tokens(request((), 0), 2)


# Numbers alone


def test_a_reason_that_no_token_was_missed_for_is_left_out() -> None:
    tally = Tally()
    tally.missed.update({Reason.DISPLACED: 5, Reason.TIER2_LATE: 0})  # they came after all
    assert report(Totals(), {"acme": tally})["all"]["missed_tokens"] == {"displaced": 5}


def test_the_seconds_of_a_replay_are_without_the_collection_after_it(
    trace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, is_collected = time.perf_counter, list[bool]()

    def perf_counter() -> float:
        is_collected.append(gc.isenabled())
        return clock()

    monkeypatch.setattr(time, "perf_counter", perf_counter)
    replayed(trace, "--metadata", "--orgs", "1")
    assert is_collected
    assert not any(is_collected)


def test_prefixes_that_come_again_are_hits_and_the_rest_has_its_reason(trace: Path) -> None:
    made = replayed(trace, "--metadata", "--orgs", "1")
    hits = BLOCK * (0 + 1 + 2 + 3)
    assert made["requests"] == 4
    assert made["all"]["requested_tokens"] == ASKED
    assert made["all"]["hit_tokens"] == {"dram": hits}
    assert made["all"]["hit_rate"] == pytest.approx(hits / ASKED)
    assert made["all"]["missed_tokens"] == {"never_stored": ASKED - hits}
    assert 0 < made["ttft"]["gain"] < 1
    assert made["ttft"]["mean_seconds"] < made["ttft"]["mean_seconds_without_cache"]


def test_orgs_share_nothing_and_who_asked_nothing_has_no_rate(trace: Path) -> None:
    made = replayed(trace, "--metadata", "--orgs", "50", "--seed", "3")
    homes = {tenant("1", 50, 3), tenant("2", 50, 3)}
    assert len(homes) == 2
    assert {org for org, hits in made["orgs"].items() if hits["requests"]} == {
        f"org-{home}" for home in homes
    }
    silent = next(hits for hits in made["orgs"].values() if not hits["requests"])
    assert silent["hit_rate"] is None
    assert made["all"]["hit_tokens"] == {"dram": BLOCK * (0 + 0 + 2 + 3)}


def test_where_little_fits_much_is_evicted(trace: Path) -> None:
    made = replayed(trace, "--metadata", "--orgs", "1", "--slots", "24")
    assert made["all"]["missed_tokens"]["displaced"] > 0
    assert made["all"]["hit_rate"] < replayed(trace, "--metadata", "--orgs", "1")["all"]["hit_rate"]


def test_time_is_the_traces_own(tmp_path: Path) -> None:
    hours = written(tmp_path, [asked(0, [0, 1]), asked(3_599_000, [0, 1]), asked(7_200_000, [0, 1])])
    made = replayed(hours, "--metadata", "--orgs", "1")
    assert made["all"]["missed_tokens"]["expired"] == 2 * BLOCK, "an hour after its last use"


@pytest.mark.parametrize("first", [0, 10**12, 10**15])
def test_it_does_not_matter_when_a_trace_begins(tmp_path: Path, first: int) -> None:
    """Columns that expire at a time are displaced before."""
    requests = [asked(first + 1000 * at, [4 * at, 4 * at + 1]) for at in range(20)]
    made = replayed(written(tmp_path, requests), "--metadata", "--orgs", "1", "--slots", "24")
    assert made["requests"] == 20
    assert made["all"]["missed_tokens"] == {"never_stored": 20 * 2 * BLOCK}


def test_only_so_many_requests_are_served(trace: Path) -> None:
    assert replayed(trace, "--metadata", "--requests", "2")["requests"] == 2


def test_a_faster_trace_takes_its_time_divided_by_so_much(trace: Path) -> None:
    assert replayed(trace, "--metadata", "--speed", "20")["seconds"] >= 2.0 / 20


def test_a_trace_that_counts_from_1970_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []
    monkeypatch.setattr("swdriver_shim.replay.emulator.time.sleep", waits.append)
    since_1970 = [{**one, "timestamp": one["timestamp"] + 1_700_000_000_000} for one in TRACE]
    found = replayed(written(tmp_path, since_1970), "--metadata", "--speed", "20")
    assert found["requests"] == len(TRACE)
    assert 0 < max(waits) <= 2.0 / 20


def test_sessions_are_replayed_too(tmp_path: Path) -> None:
    nested = {"t": 2.0, "in": 100, "out": 5, "hash_ids": [0]}
    requests = [
        {"t": 0.0, "in": 128, "out": 5, "hash_ids": [0, 1]},
        {"t": 3.0, "in": 192, "out": 5, "hash_ids": [0, 1, 2], "requests": [nested]},
    ]
    for name in ("one", "other"):
        session = {"block_size": 64, "requests": requests}
        (tmp_path / f"{name}.json").write_text(json.dumps(session))
    made = replayed(tmp_path / "one.json", "--metadata", "--orgs", "1")
    assert made["all"]["hit_tokens"] == {"dram": 64 + 128}
    both = main(["replay", str(tmp_path), "--metadata", "--json", str(tmp_path / "both")])
    assert both == 1, "the report is no session"


def test_the_table_says_what_a_person_looks_for(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(trace), "--metadata", "--orgs", "9"]) == 0
    told = capsys.readouterr()
    for words in (
        "4 requests",
        "org-8",
        "no traffic",
        "never stored",
        "p99",
        "sooner",
        "Wrong bytes: 0",
    ):
        assert words in told.out
    assert told.err == "", "no progress bar where nobody looks"


def public_trace() -> list[Request]:
    path = traces_folder() / "conversation.jsonl"
    if not path.exists():
        pytest.skip(f"there is no {path}: TRACES_DIR says where the public traces are")
    return list(conversations(path))


def hit_blocks(directory: Path, requests: Sequence[Request], slots: int) -> float:
    """Of whole blocks, of one org, where the least recently used go."""
    whole = [
        asked(round(each.at_s * 1000), each.blocks[: each.whole_blocks], out=0) for each in requests
    ]
    options = ("--metadata", "--orgs", "1", "--displacement", "lru", "--slots", str(slots))
    made = replayed(written(directory, whole), *options)
    return float(made["all"]["hit_tokens"]["dram"] / BLOCK)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_hits_are_those_that_others_computed(tmp_path: Path) -> None:
    requests = public_trace()
    blocks = sum(len(each.blocks) for each in requests)
    assert hit_blocks(tmp_path, requests, 10_000_000) / blocks == pytest.approx(0.366, abs=0.006)


@pytest.mark.slow
def test_with_little_room_hits_are_those_of_any_cache_of_blocks(tmp_path: Path) -> None:
    requests = public_trace()[:700]
    held, room, hits = OrderedDict[int, None](), 1500, 0
    for each in requests:
        blocks = each.blocks[: each.whole_blocks]
        hits += sum(1 for _ in takewhile(held.__contains__, blocks))
        for block in reversed(blocks):  # the first is the last to go
            held[block] = None
            held.move_to_end(block)
        while len(held) > room:
            held.popitem(last=False)
    columns = room * BLOCK // COLUMN_TOKENS
    # Blocks are given up as a whole there, and column by column here.
    assert hit_blocks(tmp_path, requests, columns) == pytest.approx(hits, rel=0.02)


# With bytes


@pytest.mark.slow
def test_bytes_go_through_agents_that_are_started_and_gone_after(trace: Path) -> None:
    made = replayed(trace, "--orgs", "1", "--agents", "2", "--slots", "200", "--scale", "96")
    assert made["all"]["hit_tokens"] == {"dram": BLOCK * 6}
    assert made["load"]["bytes"] == BLOCK * 6 * 96
    assert made["store"]["bytes"] >= (ASKED - BLOCK * 6) * 96
    assert made["load"]["gigabytes_per_second"] > 0
    assert made["wrong_bytes"] == 0


@pytest.mark.slow
def test_a_shard_moves_with_its_bytes_and_its_old_home_is_not_needed_any_more() -> None:
    wafer = Wafer(wafer_layout(1, 96))
    keys, tokens = Keys("acme", b"s" * 32, wafer.namespace), [7] * BLOCK
    with fleet.started(wafer.layout, 20, 2) as agents:
        shards = agents.shards()
        with contextlib.closing(Driver(wafer.layout, "m", shards)) as driver:
            emulator = Emulator(DriverCache(driver, wafer))
            emulator.serve(keys, tokens)
            move = agents.move(shards[0][0], to=1)
            assert move.slots == BLOCK / COLUMN_TOKENS
            assert move.began < move.ended
            served = emulator.serve(keys, tokens)
            assert (served.hit, served.load.wrong_bytes) == (BLOCK, 0)
        again = agents.shards()
        assert [shard.slots for shard in again[0]] == [20] * 4, "all are where the fleet says"
        for shard in again[0]:
            shard.close()


PROJECT: Final = Path(__file__).parent.parent.parent


def agents_of(pid: int, count: int, *, but: Collection[psutil.Process] = ()) -> list[psutil.Process]:
    """The agents that a process has started, when there are so many. `but`: children from before."""
    found: list[psutil.Process] = []

    def are_there() -> bool:
        others = [each for each in psutil.Process(pid).children() if each not in but]
        found[:] = [each for each in others if "kvss_agent" in each.cmdline()]
        return len(found) == count

    wait_until(f"{count} agents", are_there)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_agents_end_with_their_replay_however_it_ends(tmp_path: Path, number: signal.Signals) -> None:
    trace = written(tmp_path, [asked(0, [0]), asked(3_600_000, [0])])
    command = ("-m", "swdriver_shim", "replay", str(trace), "--speed", "1", "--slots", "20")
    with tempfile.TemporaryDirectory() as scratch:  # whose name is short enough for sockets
        environment = {**os.environ, "TMPDIR": scratch}
        with subprocess.Popen([sys.executable, *command], cwd=PROJECT, env=environment) as replay:
            agents = agents_of(replay.pid, 2)
            replay.send_signal(number)
            replay.wait(60)
        wait_until("the agents have ended", lambda: not any(each.is_running() for each in agents))
        if number != signal.SIGKILL:
            assert replay.returncode == 128 + number
            assert not list(Path(scratch).iterdir())


@pytest.mark.slow
def test_an_agent_ends_that_is_still_starting_when_the_replay_is_interrupted() -> None:
    started: list[psutil.Process] = []
    before = psutil.Process().children()

    def interrupt() -> None:
        started.extend(agents_of(os.getpid(), 1, but=before))
        os.kill(os.getpid(), signal.SIGINT)

    interrupting = threading.Thread(target=interrupt)
    interrupting.start()
    with pytest.raises(KeyboardInterrupt), fleet.started(wafer_layout(1, 96), 20, 1):
        interrupting.join(60)
    interrupting.join()
    assert not started[0].is_running()


def test_an_agent_that_is_just_being_made_when_the_replay_is_ended_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It was lost, and made its directory anew after all was removed."""
    made = []

    class Interrupted(subprocess.Popen[bytes]):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            made.append(psutil.Process(self.pid))
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(subprocess, "Popen", Interrupted)
    with pytest.raises(SystemExit), fleet.started(wafer_layout(1, 96), 20, 1):
        pytest.fail("it was told to end")
    [process] = made
    assert not process.is_running()


def test_bytes_go_to_an_agent_that_runs_already(trace: Path, tmp_path: Path) -> None:
    layout = wafer_layout(1, 96)
    shards = [
        spec(f"job-1.full.{index}", 200, 64 * size)
        for index, size in enumerate(layout.groups[0].bytes_per_token)
    ]
    (tmp_path / "secret").write_bytes(SECRET)
    with agent(tmp_path / "agent") as running:
        running.tell(document(1, *shards))
        where = ("--agent", f"unix:{running.directory}/data.sock", "--driver", "job-1")
        options = (*where, "--secret-file", str(tmp_path / "secret"), "--orgs", "1")
        made = replayed(trace, *options, "--scale", "96")
        assert made["all"]["hit_tokens"] == {"dram": BLOCK * 6}
        with pytest.raises(fleet.NoAgent, match="the layout wants"):
            fleet.at(where[1], wafer_layout(1, 96_000), Credentials("job-1", SECRET))
        with pytest.raises(fleet.NoAgent, match="can't be used"):
            fleet.at(where[1], layout, Credentials("nobody", SECRET))


# Mistakes


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ("", "There are no requests"),
        ("{\n", "line 1"),
        ('{"timestamp": 0, "input_length": 9, "output_length": 1, "hash_ids": []}\n', "0 blocks for 9"),
        ("[]\n", "not a JSON object"),
        ("[" * 100_000, "line 1: nested too deep"),
        (json.dumps(asked(10**400, [])), "line 1: timestamp is 1000"),
        (json.dumps(asked(0, [], tokens=10**15)), "line 1: input_length is 1000000000000000.0, not a"),
        (json.dumps(asked(0, [1], out=10**15)), "line 1: output_length is 1000000000000000.0, not a"),
    ],
)
def test_a_trace_that_is_none_is_told_where(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], lines: str, words: str
) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(lines)
    assert main(["replay", str(path), "--metadata"]) == 1
    told = capsys.readouterr().err
    assert words in told
    assert str(path) in told
    assert "Traceback" not in told


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["/nowhere.jsonl"], "/nowhere.jsonl can't be read: No such file"),
        (["{trace}", "--metadata", "--scale", "3"], "3 bytes per token are too few"),
        (["{trace}", "--agent", "unix:/nowhere"], "needs --secret-file"),
        (["{trace}", "--agent", "nowhere", "--secret-file", "{trace}"], "no address"),
        (["{trace}", "--agent", "unix:/nowhere", "--secret-file", "/nowhere"], "/nowhere can't be read"),
        (["{trace}", "--agent", "unix:/nowhere", "--secret-file", "{trace}"], "can't be used"),
        (["{trace}", "--slots", "9000000000000"], "An agent can't be used"),
        (["{trace}", "--metadata", "--json", "/nowhere/report"], "/nowhere/report can't be written"),
    ],
)
def test_what_can_not_be_done_is_a_sentence(
    trace: Path, capsys: pytest.CaptureFixture[str], options: list[str], words: str
) -> None:
    assert main(["replay", *(option.format(trace=trace) for option in options)]) == 1
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    "options",
    [
        ["--speed", "0"],
        ["--orgs", "0"],
        ["--slots", "many"],
        ["--tier2", "0"],
        ["--tier2", "9 parsecs"],
        ["--wait", "0s"],
        ["--metadata", "--agent", "unix:/a"],
        ["--x"],
    ],
)
def test_options_that_make_no_sense_are_refused(
    trace: Path, capsys: pytest.CaptureFixture[str], options: list[str]
) -> None:
    with pytest.raises(SystemExit) as refused:
        main(["replay", str(trace), *options])
    assert refused.value.code == 2
    assert "usage:" in capsys.readouterr().err


def test_sizes_and_durations_have_the_units_of_all_commands() -> None:
    assert (size("20GB"), size("1KiB"), size("1024")) == (20 * 10**9, 1024, 1024)
    assert (seconds("90s"), seconds("1m30s"), seconds("1.5")) == (90, 90, 1.5)


def test_help_shows_examples(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["replay", "--help"])
    assert ended.value.code == 0
    told = capsys.readouterr().out
    assert "examples:" in told
    assert "--metadata" in told
