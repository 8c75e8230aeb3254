"""The agent as it runs: told what to be over HTTP, killed, drained, started again."""

from __future__ import annotations

import itertools
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from console.environment import PROJECT
from kvss_agent.client import Header, Lost, Miss, Recalled, ShardClient, TierAnswer, Wanted
from kvss_agent.data_plane.channel import STALL_SECONDS
from kvss_agent.metrics import METRICS
from kvss_agent.pulls import SOURCE_SECONDS
from tests.kvss_agent.plane import PAYLOAD, READER, TAG, column, kv, place
from tests.kvss_agent.process import AgentProcess, agent, document, spec
from tests.kvss_agent.stores import tier2
from tests.live import wait_until

pytestmark = pytest.mark.slow  # each starts a process


@pytest.fixture
def running(tmp_path: Path) -> Iterator[AgentProcess]:
    with agent(tmp_path / "a") as made:
        yield made


def test_it_becomes_what_it_is_told_and_says_so(running: AgentProcess) -> None:
    assert running.http.get("/-/health").json() == {"live": True, "ready": True}
    seen = running.tell(document(1, spec("a"), spec("b", slots=4, payload=4096)))
    assert [(shard["name"], shard["state"], shard["slots"]) for shard in seen["shards"]] == [
        ("a", "ready", 8),
        ("b", "ready", 4),
    ]
    assert seen["memory"]["granted_bytes"] == 8 * spec()["slot_bytes"] + 4 * 8192
    with running.client("shm", "a") as shard:
        number = shard.evict(0, column("x").key, TAG, 64, kv())
        assert isinstance(shard.refill([Wanted(0, column("x", number))], [place()])[0], Header)
        detail = running.http.get("/v1/shards/a").json()
        assert (detail["applied"], detail["occupied_slots"], detail["writer"]) == (1, 1, "shm")
    seen = running.tell(document(2, spec("a", slots=2)))
    assert [(shard["name"], shard["slots"]) for shard in seen["shards"]] == [("a", 2)]
    with pytest.raises(Lost, match="there is no shard b"), running.client("unix", "b"):
        pass


def test_a_document_is_taken_whole_in_order_and_only_if_it_makes_sense(running: AgentProcess) -> None:
    running.tell(document(5, spec()))

    def refused(told: object, status: int) -> str:
        answer = running.http.put("/v1/desired", json=told)
        assert answer.status_code == status, answer.text
        assert answer.headers["content-type"] == "application/problem+json"
        return str(answer.json()["detail"])

    assert running.http.put("/v1/desired", json=document(5, spec())).status_code == 202
    assert "Generation 5 is newer" in refused(document(4), 409)
    assert "with other contents" in refused(document(5), 409)
    assert "unknown field `slotz`" in refused(document(6, spec(slotz=1)), 422)
    assert "multiple of 4096" in refused(document(6, spec() | {"slot_bytes": 5000}), 422)
    assert "not among the peers" in refused(document(6, spec() | {"driver": "nobody"}), 422)
    assert "two entries for shard s" in refused(document(6, spec(), spec()), 422)
    assert "unknown field `pth`" in refused(
        document(6, tier2={"kind": "posix", "path": "/x", "pth": 1, "cap_bytes": 1}), 422
    )
    assert running.observed()["generation"] == 5


def test_without_its_token_nobody_learns_or_changes_anything(running: AgentProcess) -> None:
    for method, path in [
        ("GET", "/metrics"),
        ("GET", "/v1/observed"),
        ("GET", "/v1/shards/s"),
        ("PUT", "/v1/desired"),
        ("POST", "/v1/purge"),
        ("POST", "/v1/drain"),
        ("POST", "/v1/shards/s/pull"),
        ("GET", "/v1/pulls"),
    ]:
        for token in ("", "Bearer wrong", "Basic abc"):
            answer = running.http.request(method, path, headers={"authorization": token})
            assert answer.status_code == 401, (method, path)
    assert running.http.get("/v2").status_code == 404
    assert running.http.put("/v1/desired", content=b"x" * (9 << 20)).status_code == 413


def test_a_grant_that_does_not_fit_is_refused_and_the_rest_goes_on(tmp_path: Path) -> None:
    with agent(tmp_path / "a", "--memory", "1M") as running:
        seen = running.tell(document(1, spec("small", slots=4), spec("large", slots=1000)))
        states = {shard["name"]: (shard["state"], shard["reason"]) for shard in seen["shards"]}
        assert states["small"] == ("ready", "")
        assert states["large"][0] == "refused"
        assert "1048576 are allowed" in states["large"][1]
        assert not seen["ready"]
        assert running.http.get("/-/health").status_code == 503
        grown = running.tell(document(2, spec("small", slots=1000)))["shards"][0]
        assert (grown["state"], grown["slots"]) == ("refused", 4)


def test_after_a_kill_it_is_again_what_it_was_told_and_empty(running: AgentProcess) -> None:
    running.tell(document(3, spec()))
    with running.client("shm") as shard:
        number = shard.evict(0, column("x").key, TAG, 64, kv())
        before = shard.incarnation
        running.kill()
        wait_until("the driver knows", lambda: is_lost(shard, number))
    running.start()
    wait_until("it is ready", lambda: running.observed()["ready"])
    assert running.observed()["generation"] == 3
    with running.client("shm") as shard:
        assert shard.incarnation != before
        assert shard.applied == 0
        assert shard.refill([Wanted(0, column("x", number))], [place()]) == [Miss.ABSENT]


def is_lost(shard: ShardClient, number: int) -> bool:
    try:
        shard.refill([Wanted(0, column("x", number))], [place()])
    except Lost:
        return True
    return False


def use(shard: ShardClient, payloads: dict[str, memoryview], spilled: threading.Event) -> None:
    for index in itertools.count():
        name, into = f"c{index % 8}", place()
        number = shard.evict(index % 8, column(name).key, TAG, 64, payloads[name])
        wanted = [Wanted(index % 8, column(name, number))]
        assert isinstance(shard.refill(wanted, [into])[0], Header)
        assert into == payloads[name]
        shard.spill(wanted)
        spilled.set()


@pytest.mark.parametrize("kind", ["shm", "unix"])
def test_killed_in_the_middle_of_evicts_refills_and_spills_it_never_gives_a_wrong_byte(
    tmp_path: Path, kind: str
) -> None:
    """What is found afterwards in tier 2 is whole, and what is not found is a miss."""
    files = tmp_path / "files"
    payloads = {f"c{index}": kv() for index in range(8)}
    with agent(tmp_path / "a") as running:
        for round_ in range(1, 4):
            running.tell(document(round_, spec(), tier2=tier2(files)))
            with running.client(kind) as shard:
                spilled = threading.Event()

                def kill_soon(spilled: threading.Event = spilled) -> None:
                    spilled.wait(30)
                    time.sleep(0.1)
                    running.kill()

                killer = threading.Thread(target=kill_soon)
                killer.start()
                with pytest.raises(Lost):
                    use(shard, payloads, spilled)
                killer.join()
            running.start()
            wait_until("it is ready", lambda: running.observed()["ready"])
            with running.client(kind) as shard:
                wanted = [Wanted(index, column(f"c{index}")) for index in range(8)]
                numbers = shard.recall(wanted)
                assert any(isinstance(recalled, Recalled) for recalled in numbers)
                for index, recalled in enumerate(numbers):
                    into = place()
                    if not isinstance(recalled, Recalled):
                        assert recalled is Miss.ABSENT
                        continue
                    [found] = shard.refill([Wanted(index, column(f"c{index}", recalled.number))], [into])
                    assert isinstance(found, Header)
                    assert into == payloads[f"c{index}"]


@pytest.mark.parametrize("kind", ["shm", "unix"])
def test_columns_go_to_tier_2_and_come_back_into_any_slot(
    tmp_path: Path, running: AgentProcess, kind: str
) -> None:
    running.tell(document(1, spec(), tier2=tier2(tmp_path / "files")))
    payload, into = kv(), place()
    with running.client(kind) as shard:
        number = shard.evict(0, column("x").key, TAG, 64, payload)
        assert shard.exists([column("x")]) == [False]
        spilled = [Wanted(0, column("x", number)), Wanted(1, column("y", number))]
        assert shard.spill(spilled, notes=[2**64 - 1, 5]) == [TierAnswer.DONE, Miss.ABSENT]
        assert shard.spill(spilled[:1], notes=[7]) == [TierAnswer.ALREADY]
        assert shard.exists([column("x"), column("y")]) == [True, False]
        shard.delete([0])
        [recalled, missing] = shard.recall([Wanted(5, column("x")), Wanted(6, column("y"))])
        assert missing is Miss.ABSENT
        assert isinstance(recalled, Recalled)
        assert recalled.note == 2**64 - 1
        [found] = shard.refill([Wanted(5, column("x", recalled.number))], [into])
        assert isinstance(found, Header)
        assert into == payload
        assert shard.recall([Wanted(4, column("x", tag=b"o" * 16))]) == [Miss.ABSENT]
        assert shard.tier_delete([column("x")]) == [TierAnswer.DONE]
        assert shard.exists([column("x")]) == [False]
        shard.spill([Wanted(5, column("x", recalled.number))])
    receipt = running.http.post("/v1/purge", json={"tag": TAG.hex()}).json()
    assert (receipt["columns"], receipt["bytes"] > PAYLOAD) == (1, True)
    with running.client(kind) as shard:
        assert shard.exists([column("x")]) == [False]
    text = running.http.get("/metrics").text
    assert "kvss_tier2_columns 0" in text


def test_tier_2_that_cannot_be_opened_is_said_and_refused(running: AgentProcess, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no directory")
    seen = running.tell(document(1, spec(), tier2=tier2(tmp_path / "file")))
    assert seen["tier2"]["state"] == "refused"
    assert seen["tier2"]["reason"]
    assert seen["shards"][0]["state"] == "ready"
    with running.client() as shard:
        number = shard.evict(0, column("x").key, TAG, 64, kv())
        assert shard.spill([Wanted(0, column("x", number))]) == [Miss.REFUSED]
    refused = running.http.post("/v1/purge", json={"tag": TAG.hex()})
    assert (refused.status_code, "not open" in refused.json()["detail"]) == (503, True)
    running.tell(document(2, spec()))
    assert running.http.post("/v1/purge", json={"tag": TAG.hex()}).status_code == 409


def test_a_shard_moves_to_another_agent_slot_by_slot_while_both_are_used(tmp_path: Path) -> None:
    with agent(tmp_path / "old") as old, agent(tmp_path / "new") as new:
        old.tell(document(1, spec(slots=100, payload=4096)))
        payloads = {slot: kv(4096) for slot in range(90)}
        with old.client("shm") as shard:
            for slot, payload in payloads.items():
                number = shard.evict(slot, column(f"{slot}").key, TAG, 64, payload)
            new.tell(document(1, spec(slots=100, payload=4096, applied=number)))
            with new.client("shm") as fresh:
                assert fresh.applied == number
                newer = kv(4096)
                latest = fresh.evict(7, column("newer").key, TAG, 64, newer)
                answer = new.http.post(
                    "/v1/shards/s/pull",
                    json={
                        "from": f"unix:{old.directory}/data.sock",
                        "shard": "s",
                        "as": READER,
                        "after": number,
                        "slots": list(range(100)),
                    },
                )
                assert answer.status_code == 202, answer.text
                path = f"/v1/pulls/{answer.json()['id']}"
                wait_until("all is over", lambda: new.http.get(path).json()["state"] != "running")
                pull = new.http.get(path).json()
                assert (pull["state"], pull["moved"], pull["done"]) == ("done", 89, 100)
                assert pull["skipped"] == {"newer": 1, "absent": 10}
                for slot, payload in payloads.items():
                    into = place(4096)
                    expected = column("newer", latest) if slot == 7 else column(f"{slot}", slot + 1)
                    [found] = fresh.refill([Wanted(slot, expected)], [into])
                    assert isinstance(found, Header)
                    assert into == (newer if slot == 7 else payload)


def test_a_pull_from_nowhere_fails_with_a_reason(running: AgentProcess) -> None:
    running.tell(document(1, spec()))
    asked = {"from": "tcp:127.0.0.1:1", "shard": "s", "as": READER, "slots": [0]}
    pull = running.http.post("/v1/shards/s/pull", json=asked).json()
    path = f"/v1/pulls/{pull['id']}"
    wait_until("it is over", lambda: running.http.get(path).json()["state"] == "failed")
    assert "Connection refused" in running.http.get(path).json()["reason"]
    odd = running.http.post("/v1/shards/s/pull", json={**asked, "from": f"tcp:{'a' * 300}:1"}).json()
    path = f"/v1/pulls/{odd['id']}"
    wait_until("it is over", lambda: running.http.get(path).json()["state"] == "failed")
    assert running.http.post("/v1/shards/no/pull", json=asked).status_code == 404
    assert running.http.post("/v1/shards/s/pull", json={**asked, "from": "x"}).status_code == 422
    assert running.http.post("/v1/shards/s/pull", json={**asked, "as": "nobody"}).status_code == 409
    assert running.http.get("/v1/pulls/none").status_code == 404


def test_a_pull_that_waits_can_be_cancelled(tmp_path: Path) -> None:
    with agent(tmp_path / "old") as old, agent(tmp_path / "new") as new:
        old.tell(document(1, spec()))
        new.tell(document(1, spec()))
        asked = {"from": f"unix:{old.directory}/data.sock", "shard": "s", "as": READER, "slots": [0]}
        pull = new.http.post("/v1/shards/s/pull", json={**asked, "after": 1}).json()  # which never comes
        path = f"/v1/pulls/{pull['id']}"
        assert new.http.get(path).json()["state"] == "running"
        old.process.send_signal(signal.SIGSTOP)  # so that nothing but the cancelling ends it
        try:
            assert new.http.delete(path).status_code == 202
            wait_until(
                "it is over, before its source is given up",
                lambda: new.http.get(path).json()["state"] == "cancelled",
                SOURCE_SECONDS + STALL_SECONDS,
            )
        finally:
            old.process.send_signal(signal.SIGCONT)
        assert new.stop() == 0


def test_sigterm_lets_drivers_leave_and_then_ends(running: AgentProcess) -> None:
    running.tell(document(1, spec()))
    with running.client() as shard:
        shard.wait_applied(shard.evict(0, column("x").key, TAG, 64, kv()))
        running.process.send_signal(signal.SIGTERM)
        wait_until("it waits for drivers", lambda: "Draining" in running.log)
        assert running.process.poll() is None
    assert running.process.wait(30) == 0
    assert not (running.directory / "data.sock").exists()
    assert "all connections had ended" in running.log


def test_a_large_grant_does_not_keep_it_from_stopping(running: AgentProcess) -> None:
    available = running.observed()["memory"]["available_bytes"]
    told = document(1, spec("huge", slots=min(available // 2, 8 << 30) >> 20, payload=(1 << 20) - 64))
    assert running.http.put("/v1/desired", json=told).status_code == 202
    wait_until("it is at it", lambda: running.observed()["shards"][0]["progress"]["done_bytes"] > 0)
    assert running.stop() == 0


def test_an_agent_that_stops_answering_is_lost_and_nobody_waits_for_ever(
    running: AgentProcess,
) -> None:
    running.tell(document(1, spec()))
    for kind in ("unix", "shm"):
        with running.client(kind) as shard:
            number = shard.evict(0, column("x").key, TAG, 64, kv())
            shard.wait_applied(number)
        with running.client(kind, stall_seconds=3.0) as shard:  # so impatient only where nobody answers
            running.process.send_signal(signal.SIGSTOP)
            try:
                with pytest.raises(Lost, match="does not answer"):
                    shard.spill([Wanted(0, column("x", number))], wait_seconds=0.1, seconds=0.2)
                # What is in shared memory is there whether the agent answers or not.
                if kind == "shm":
                    assert isinstance(
                        shard.refill([Wanted(0, column("x", number))], [place()])[0], Header
                    )
            finally:
                running.process.send_signal(signal.SIGCONT)


def test_memory_is_what_the_grants_say_and_a_little(running: AgentProcess) -> None:
    def resident() -> int:
        return int(psutil.Process(running.process.pid).memory_info().rss)

    before = resident()
    size, slots = 1 << 20, 256
    running.tell(document(1, spec("large", slots, size)))
    granted = running.observed()["memory"]["granted_bytes"]
    with running.client("unix", "large") as shard:
        for slot in range(slots):
            number = shard.evict(slot, column("x").key, TAG, 64, kv(size))
        shard.wait_applied(number, 60)
    assert abs(resident() - before - granted) < 24 << 20
    assert before < 120 << 20
    running.tell(document(2))
    wait_until("it is given back", lambda: resident() - before < 24 << 20)


def test_64_idle_shards_cost_next_to_nothing(running: AgentProcess) -> None:
    """Measured properly in the benchmark; here: nothing spins, also after it has been used."""
    running.tell(document(1, *(spec(f"s{index}", slots=1, payload=4000) for index in range(64))))
    with running.client("shm", "s0"), running.client("unix", "s1") as shard:
        number = shard.evict(0, column("x").key, TAG, 64, kv(4000))
        shard.wait_applied(number)
        wanted = [Wanted(0, column("x", number))]
        assert isinstance(shard.refill(wanted, [place()])[0], Header)
        assert shard.refill([Wanted(0, column("x", 9))], [place()]) == [Miss.LATE]
        process = psutil.Process(running.process.pid)
        before, began = process.cpu_times(), time.monotonic()
        time.sleep(2)
        after, seconds = process.cpu_times(), time.monotonic() - began
    used = after.user + after.system - before.user - before.system
    assert used / seconds < 0.05


def test_metrics_are_what_prometheus_reads(running: AgentProcess, tmp_path: Path) -> None:
    """All of them, where tier 2 has a front."""
    front = {"path": str(tmp_path / "front"), "cap_bytes": 64 << 20, "writes": "through"}
    running.tell(document(1, spec(), tier2=tier2(tmp_path / "files") | {"front": front}))
    with running.client() as shard:
        shard.wait_applied(shard.evict(0, column("x").key, TAG, 64, kv()))
    text = running.http.get("/metrics").text
    assert 'kvss_shard_applied{shard="s"} 1' in text
    assert 'kvss_evict_seconds_count{shard="s"} 1' in text
    assert 'kvss_bytes_total{shard="s",direction="in"} 65536' in text
    assert {metric.name for metric in METRICS} == set(re.findall(r"^# TYPE (\S+)", text, re.MULTILINE))


@pytest.mark.parametrize(
    ("options", "environment", "said"),
    [
        (["--tcp", "0.0.0.0:1"], {}, "--tcp needs --tls-certificate"),
        (["--memory", "lots"], {}, "--memory is 'lots': it should be 512MiB or 64GiB"),
        ([], {"KVSS_AGENT_MEMROY": "1G"}, "KVSS_AGENT_MEMROY is not a setting"),
        ([], {"KVSS_AGENT_SERVICE_HOST": "10.0.0.7"}, "set `enableServiceLinks: false` in the pod's"),
        (["--control", "here"], {"KVSS_AGENT_DRAIN_SECONDS": "-1"}, "--drain-seconds is '-1'"),
        (["--tls-certificate", "/etc/hostname"], {}, "belong together"),
        (["--repair-bytes-per-second", "0"], {}, "should be at least 64KiB"),
    ],
)
def test_a_setting_that_is_wrong_stops_the_start_with_a_sentence(
    tmp_path: Path, options: list[str], environment: dict[str, str], said: str
) -> None:
    run = subprocess.run(
        [sys.executable, "-m", "kvss_agent", "--state-dir", str(tmp_path), *options],
        cwd=PROJECT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (run.returncode, run.stdout) == (78, "")
    assert said in run.stderr
    assert "Traceback" not in run.stderr


def test_help_tells_everything() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "kvss_agent", "--help"],
        cwd=PROJECT,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert "--tls-authorities" in run.stdout
    assert "KVSS_AGENT_STATE_DIR" in run.stdout
