"""Weights on a mount and in a bucket: a real S3 server, real processes, and faults between them."""

from __future__ import annotations

import hashlib
import itertools
import os
import random
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import obstore
import pytest
from obstore.store import S3Store

from console.environment import PROJECT
from tests.kvss_agent.tier2 import bucket
from tests.kvss_agent.tier2.bucket import BUCKET, CREDENTIALS, Server
from tests.workload_manager.weights import proxy, until_half
from tests.workload_manager.weights.until_half import RANGE_BYTES, shown
from workload_manager.single_flight import Cancelled
from workload_manager.spec import WeightsSpec
from workload_manager.weights import WeightsError, download, prepare
from workload_manager.weights.download import Download
from workload_manager.weights.etags import MIB, matches
from workload_manager.weights.progress import Progress
from workload_manager.weights.sources import Bucket

_prefixes = (f"model-{number}" for number in itertools.count())
FILES = {
    "config.json": b'{"architectures": ["LlamaForCausalLM"]}',
    "a/model-1.safetensors": random.Random(1).randbytes(700_001),
    "a/model-2.safetensors": random.Random(2).randbytes(RANGE_BYTES * 4),
}
TOTAL = sum(map(len, FILES.values()))


def never() -> bool:
    return False


def ignore(progress: Progress) -> None:
    pass


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with bucket.running() as server:
        server.make_bucket()
        yield server


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of another bucket, which must not matter."""
    for name in CREDENTIALS:
        monkeypatch.setenv(name, "somebody else's")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setattr(download, "BACKOFF_SECONDS", (0.001, 0.01))


@pytest.fixture
def put(server: Server) -> Callable[[str, Mapping[str, bytes]], str]:
    store = S3Store(
        BUCKET,
        endpoint=server.endpoint,
        region="us-east-1",
        access_key_id="tests",
        secret_access_key="tests",
        client_options={"allow_http": True},
    )

    def put(prefix: str, files: Mapping[str, bytes]) -> str:
        for name, raw in files.items():
            obstore.put(store, f"{prefix}/{name}", raw, use_multipart=False)
        return f"s3://{BUCKET}/{prefix}"

    return put


@pytest.fixture
def source(put: Callable[[str, Mapping[str, bytes]], str]) -> str:
    return put(next(_prefixes), FILES)


def bring(
    source: str,
    endpoint: str,
    store: Path,
    report: Callable[[Progress], None] = ignore,
    is_cancelled: Callable[[], bool] = never,
    hashes: Mapping[str, str] | None = None,
) -> Path:
    spec = WeightsSpec(source=source, endpoint=endpoint)
    return Download(Bucket(spec, shown()), store, hashes or {}, report, is_cancelled, RANGE_BYTES).run()


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()
    }


def test_files_come_from_a_bucket_in_ranges_and_are_shared(
    server: Server, source: str, tmp_path: Path
) -> None:
    seen: list[Progress] = []
    with proxy.before(server.port) as (endpoint, traffic):
        spec = WeightsSpec(source=source, endpoint=endpoint)
        folder = bring(source, endpoint, tmp_path, seen.append)
        assert contents(folder) == FILES
        assert sum(traffic.ranges.values()) == 1 + 11 + 4
        assert max(traffic.ranges.values()) == 1
        assert (seen[-1].done, seen[-1].total, seen[-1].unit) == (TOTAL, TOTAL, "bytes")
        assert [one.done for one in seen] == sorted(one.done for one in seen)
        traffic.ranges.clear()
        assert prepare(spec, shown(), tmp_path, ignore, never) == folder
        assert not traffic.ranges, "it is there"
    assert [path.name for path in folder.parent.glob("*")] == [f".{folder.name}.lock", folder.name] or [
        folder.name,
        f".{folder.name}.lock",
    ], "nothing is left over"


def test_another_version_has_another_folder(
    server: Server, put: Callable[[str, Mapping[str, bytes]], str], tmp_path: Path
) -> None:
    prefix = next(_prefixes)
    source = put(prefix, FILES)
    first = bring(source, server.endpoint, tmp_path)
    put(prefix, {"config.json": b"{}"})
    second = bring(source, server.endpoint, tmp_path)
    assert first != second
    assert (contents(first), contents(second)["config.json"]) == (FILES, b"{}")


def test_after_a_kill_only_what_was_missing_is_brought(
    server: Server, source: str, tmp_path: Path
) -> None:
    told = (sys.executable, "-m", until_half.__name__, server.endpoint, source, str(tmp_path))
    with subprocess.Popen(told, cwd=PROJECT, stdout=subprocess.PIPE) as process:
        assert process.stdout
        assert process.stdout.readline() == b"half\n"
        process.kill()
    [journals] = tmp_path.glob("s3/.*.journal")
    noted = sum(len(one.read_text().splitlines()) for one in journals.iterdir())
    assert 0 < noted < 16
    with proxy.before(server.port) as (endpoint, traffic):
        # The same place: its address is in the name of the folder.
        spec = WeightsSpec(source=source, endpoint=server.endpoint)
        one = Bucket(spec, shown())
        one.store = Bucket(WeightsSpec(source=source, endpoint=endpoint), shown()).store
        folder = Download(one, tmp_path, {}, ignore, never, RANGE_BYTES).run()
        assert contents(folder) == FILES
        assert sum(traffic.ranges.values()) == 16 - noted


def test_a_range_that_was_lost_on_the_disk_is_brought_again(
    server: Server, source: str, tmp_path: Path
) -> None:
    half = threading.Event()

    def report(progress: Progress) -> None:
        if progress.done * 2 > progress.total:
            half.set()

    with pytest.raises(Cancelled):
        bring(source, server.endpoint, tmp_path, report, half.is_set)
    [part] = tmp_path.glob("s3/.*.part")
    for path in part.rglob("*.safetensors"):
        path.write_bytes(bytes(path.stat().st_size))
    assert contents(bring(source, server.endpoint, tmp_path)) == FILES


def test_a_folder_that_somebody_has_emptied_is_filled_again(
    server: Server, source: str, tmp_path: Path
) -> None:
    folder = bring(source, server.endpoint, tmp_path)
    (folder / "a" / "model-1.safetensors").unlink()
    assert contents(bring(source, server.endpoint, tmp_path)) == FILES


@pytest.mark.parametrize("fault", ["failing", "cutting"])
def test_faults_on_the_way_are_tried_again(
    server: Server, source: str, tmp_path: Path, fault: str
) -> None:
    with proxy.before(server.port) as (endpoint, traffic):
        setattr(traffic, fault, 7)
        assert contents(bring(source, endpoint, tmp_path)) == FILES
        assert getattr(traffic, fault) == 0


def test_a_server_that_only_fails_is_given_up_in_a_sentence(
    server: Server, source: str, tmp_path: Path
) -> None:
    with proxy.before(server.port) as (endpoint, traffic):
        traffic.cutting = 1000
        with pytest.raises(WeightsError) as failure:
            bring(source, endpoint, tmp_path)
        assert failure.value.reason == "Unreachable"
        assert source in failure.value.sentence
        assert max(traffic.ranges.values()) <= download.ATTEMPTS * 4
        traffic.cutting = 0
        assert contents(bring(source, endpoint, tmp_path)) == FILES


def test_bytes_that_are_not_what_the_bucket_says_are_found_and_brought_anew(
    server: Server, source: str, tmp_path: Path
) -> None:
    with proxy.before(server.port) as (endpoint, traffic):
        traffic.damaging = 1
        with pytest.raises(WeightsError, match="is not what its ETag says"):
            bring(source, endpoint, tmp_path)
        assert contents(bring(source, endpoint, tmp_path)) == FILES


def test_hashes_that_are_given_are_checked(server: Server, source: str, tmp_path: Path) -> None:
    right = {name: hashlib.sha256(raw).hexdigest() for name, raw in FILES.items()}
    folder = bring(source, server.endpoint, tmp_path, hashes=right)
    assert contents(folder) == FILES
    wrong = {**right, "config.json": "0" * 64}
    with pytest.raises(WeightsError, match=r"config\.json .* does not have the hash") as failure:
        bring(source, server.endpoint, tmp_path, hashes=wrong)
    assert failure.value.reason == "Damaged"
    with pytest.raises(WeightsError, match="has no other"):
        bring(source, server.endpoint, tmp_path, hashes={"other": "0" * 64})
    with pytest.raises(WeightsError, match="has the SHA-256") as failure:
        prepare(WeightsSpec(source=str(folder), files=wrong), {}, tmp_path, ignore, never)
    assert prepare(WeightsSpec(source=str(folder), files=right), {}, tmp_path, ignore, never) == folder


def test_many_at_once_bring_them_once(server: Server, source: str, tmp_path: Path) -> None:
    with proxy.before(server.port) as (endpoint, traffic), ThreadPoolExecutor(4) as threads:
        found = [threads.submit(bring, source, endpoint, tmp_path) for _ in range(4)]
        [folder] = {one.result() for one in found}
        assert max(traffic.ranges.values()) == 1
    assert contents(folder) == FILES


@pytest.mark.parametrize(
    ("source", "reason", "sentence"),
    [
        ("s3://no-such-bucket-here/x", "NotFound", "There is no bucket"),
        (f"s3://{BUCKET}/nothing-here", "NotFound", "There is nothing at"),
        ("s3://", "BadSource", "is not s3://BUCKET/PREFIX"),
        ("relative/path", "BadSource", "no absolute path"),
        ("/nowhere/at/all", "NotFound", "There is no folder"),
    ],
)
def test_what_is_not_there_is_said(
    server: Server, tmp_path: Path, source: str, reason: str, sentence: str
) -> None:
    with pytest.raises(WeightsError, match=sentence) as failure:
        prepare(WeightsSpec(source=source, endpoint=server.endpoint), shown(), tmp_path, ignore, never)
    assert failure.value.reason == reason


def test_a_bucket_that_nobody_answers_for_is_unreachable(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="can't be reached") as failure:
        prepare(
            WeightsSpec(source="s3://bucket/x", endpoint="http://127.0.0.1:9"),
            shown(),
            tmp_path,
            ignore,
            never,
        )
    assert failure.value.reason == "Unreachable"


@pytest.mark.parametrize("status", [400, 403])
def test_a_bucket_that_may_not_be_read_is_denied_at_once(
    server: Server, source: str, tmp_path: Path, status: int
) -> None:
    """Viewers of a workload read the sentence: what the server repeats of keys is not in it."""
    with proxy.before(server.port) as (endpoint, traffic):
        traffic.denying = status
        with pytest.raises(WeightsError, match=r"may not be read: .* ExpiredToken\.$") as failure:
            bring(source, endpoint, tmp_path)
    assert failure.value.reason == "Denied"
    assert proxy.KEY.decode() not in str(failure.value)


@pytest.mark.parametrize(
    "source", ["s3://mine/../theirs/x", "s3://mine/a/..", "s3://mine/./x", "s3://../x"]
)
def test_no_source_leads_out_of_its_bucket(source: str, tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="is not s3://BUCKET/PREFIX") as failure:
        bring(source, "http://127.0.0.1:9", tmp_path)
    assert failure.value.reason == "BadSource"


def test_no_region_leads_to_another_server(tmp_path: Path) -> None:
    """It is a part of the server's name."""
    credentials = {**shown(), "region": "x.example.com/#"}
    with pytest.raises(WeightsError, match="The region of the credentials is none") as failure:
        prepare(WeightsSpec(source="s3://mine/x"), credentials, tmp_path, ignore, never)
    assert failure.value.reason == "BadSource"


def test_credentials_with_an_unknown_name_are_refused(tmp_path: Path) -> None:
    spec = WeightsSpec(source=f"s3://{BUCKET}/x")
    with pytest.raises(WeightsError, match="have no AWS_ACCESS_KEY_ID"):
        prepare(spec, {"AWS_ACCESS_KEY_ID": "x"}, tmp_path, ignore, never)


def test_a_disk_without_room_is_said_before_anything_is_brought(
    server: Server, source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(download, "SPARE_BYTES", 1 << 60)
    with pytest.raises(WeightsError, match=r"needs .* more in") as failure:
        bring(source, server.endpoint, tmp_path)
    assert failure.value.reason == "NoSpace"


def test_who_waits_for_another_process_may_be_cancelled(
    server: Server, source: str, tmp_path: Path
) -> None:
    told = (sys.executable, "-m", until_half.__name__, server.endpoint, source, str(tmp_path))
    with subprocess.Popen(told, cwd=PROJECT, stdout=subprocess.PIPE) as process:
        assert process.stdout
        process.stdout.readline()
        seen: list[Progress] = []
        with pytest.raises(Cancelled):
            bring(source, server.endpoint, tmp_path, seen.append, lambda: bool(seen))
        assert 0 < seen[-1].done < TOTAL, "as far as the other one is"
        process.kill()


@pytest.mark.parametrize("parts_mib", [8, 16, 7])
def test_etags_of_objects_in_parts(tmp_path: Path, parts_mib: int) -> None:
    file = tmp_path / "file"
    raw = os.urandom(20 * MIB + 5)
    file.write_bytes(raw)
    each = parts_mib * MIB
    digests = [
        hashlib.md5(raw[start : start + each], usedforsecurity=False).digest()
        for start in range(0, len(raw), each)
    ]
    whole = hashlib.md5(b"".join(digests), usedforsecurity=False).hexdigest()
    assert matches(file, f'"{whole}-{len(digests)}"') is True
    with file.open("r+b") as written:
        written.write(bytes([raw[0] ^ 1]))
    assert matches(file, f'"{whole}-{len(digests)}"') is None, "or parts of another size"
    assert matches(file, '"of-another-kind"') is None
