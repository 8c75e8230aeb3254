"""Columns in a bucket, against a server process that speaks S3 and that can be killed."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
import sys
import threading
from collections.abc import Iterator, Sequence
from datetime import timedelta
from unittest import mock

import obstore
import pytest
from obstore.store import S3Store

from kvss_agent.shard import seal
from kvss_agent.shard.seal import Miss
from kvss_agent.tier2.address import Scope
from kvss_agent.tier2.backend import Failed, Fault, Outgoing, Removed
from kvss_agent.tier2.construction import NotInstalled, make
from kvss_agent.tier2.index import Caps
from kvss_agent.tier2.s3 import S3
from kvss_agent.tier2.settings import Tier2Settings
from kvss_agent.tier2.store import Outcome
from tests.kvss_agent.tier2 import bucket
from tests.kvss_agent.tier2.bucket import BUCKET, CREDENTIALS, Server
from tests.kvss_agent.tier2.columns import (
    ACME,
    BOLT,
    NAMESPACE,
    address_of,
    evicted,
    get,
    new_slot,
    opened,
    put,
    recall,
    spill,
)

COLUMN_BYTES = 12_288
DELETED = b"<DeleteResult><Deleted><Key>x</Key></Deleted></DeleteResult>"
_prefixes = (f"store-{number}" for number in itertools.count())


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with bucket.running() as server:
        server.make_bucket()
        yield server


@pytest.fixture(autouse=True)
def _credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def prefix() -> str:
    """A store of one's own in the bucket."""
    return next(_prefixes)


def bucket_at(server: Server, prefix: str) -> S3:
    return S3(BUCKET, prefix=prefix, endpoint=server.endpoint)


def objects(server: Server, prefix: str = "") -> dict[str, int]:
    """What is in the bucket, as somebody else sees it."""
    store = S3Store(
        BUCKET, endpoint=server.endpoint, region="us-east-1", client_options={"allow_http": True}
    )
    return {item["path"]: item["size"] for page in obstore.list(store, prefix or None) for item in page}


async def test_a_column_comes_back_from_a_bucket(server: Server, prefix: str) -> None:
    addresses = [address_of(1), address_of(1, BOLT), address_of(1, shard="full-1")]
    async with opened(bucket_at(server, prefix)) as store:
        assert [await put(store, address) for address in addresses] == ["stored"] * 3
        assert [await get(store, address) for address in addresses] == ["hit"] * 3
        assert await get(store, address_of(2)) == Miss.ABSENT
        assert await store.exists([*addresses, address_of(2)]) == [True, True, True, False]
        expected = {f"{prefix}/{address.name}": COLUMN_BYTES for address in addresses}
        assert objects(server, prefix) == expected


@pytest.mark.parametrize("length", [1, 4032, 4033, 3 << 20])
async def test_columns_of_any_size(server: Server, prefix: str, length: int) -> None:
    async with opened(bucket_at(server, prefix)) as store:
        assert await put(store, address_of(1), length) == "stored"
        assert await get(store, address_of(1), length) == "hit"


async def test_the_index_is_rebuilt_from_the_listing_page_by_page(
    server: Server, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvss_agent.tier2.s3.PAGE_OBJECTS", 4)
    addresses = [address_of(number) for number in range(10)]
    async with opened(bucket_at(server, prefix), threads=16) as store:
        await asyncio.gather(*(put(store, address) for address in addresses))
        obstore.put(bucket_at(server, prefix)._store, "README", b"not ours")
    seen: list[tuple[int, int | None]] = []
    async with opened(bucket_at(server, prefix), shared=False) as store:
        await store.rebuild(lambda done, total: seen.append((done, total)))
        assert await store.exists(addresses) == [True] * 10
        assert store.stats().properties["unknown_files"] == 1
    # The first page has what the listing is checked by.
    assert seen == [(0, None), (3, None), (7, None), (11, None)]


async def test_a_full_store_evicts_from_the_bucket(server: Server, prefix: str) -> None:
    async with opened(bucket_at(server, prefix), Caps(2 * COLUMN_BYTES, 2 * COLUMN_BYTES)) as store:
        for number in range(4):
            assert await put(store, address_of(number)) == "stored"
        assert sum(objects(server, prefix).values()) == 2 * COLUMN_BYTES
        assert await store.exists([address_of(n) for n in range(4)]) == [False, False, True, True]


async def test_two_agents_share_a_bucket(server: Server, prefix: str) -> None:
    async with opened(bucket_at(server, prefix)) as one, opened(bucket_at(server, prefix)) as two:
        await put(one, address_of(1))
        assert await get(two, address_of(1)) == "hit"
        assert await two.delete([address_of(1), address_of(2)]) == Removed(1, COLUMN_BYTES)
        assert await get(one, address_of(1)) == Miss.ABSENT
        assert one.stats().bytes == 0


@pytest.mark.parametrize(
    ("scope", "left"),
    [
        ({"tag": ACME}, [False, True, False]),
        ({"namespace": NAMESPACE}, [False, False, True]),
        ({"tag": ACME, "namespace": NAMESPACE}, [False, True, True]),
    ],
    ids=["tag", "namespace", "both"],
)
async def test_a_purge_takes_all_of_its_scope_from_the_bucket(
    server: Server, prefix: str, scope: dict[str, bytes], left: list[bool]
) -> None:
    addresses = [address_of(1), address_of(2, BOLT), address_of(3, namespace=bytes(16))]
    async with opened(bucket_at(server, prefix)) as writer:
        for address in addresses:
            await put(writer, address)
        async with opened(bucket_at(server, prefix)) as store:
            receipt = await store.purge(**scope)
            assert (receipt.columns, receipt.bytes) == (
                left.count(False),
                left.count(False) * COLUMN_BYTES,
            )
            assert await store.exists(addresses) == left
            assert len(objects(server, prefix)) == left.count(True)
            assert (await store.purge(**scope)).columns == 0


async def test_damage_in_a_bucket_is_a_miss_and_removed(server: Server, prefix: str) -> None:
    backend = bucket_at(server, prefix)
    async with opened(backend) as store:
        for address in (address_of(1), address_of(2), address_of(3, BOLT)):
            await put(store, address)
        good, other, foreign = (
            bytes(obstore.get(backend._store, address.name).bytes())
            for address in (address_of(1), address_of(2), address_of(3, BOLT))
        )
        for harmed, reason in [
            (good[:5000], Miss.TORN),
            (good + bytes(4096), Miss.CORRUPT),
            (good[:9000] + bytes([good[9000] ^ 1]) + good[9001:], Miss.CORRUPT),
            (other, Miss.STALE),
            (foreign, Miss.FOREIGN),
        ]:
            obstore.put(backend._store, address_of(1).name, harmed)
            assert await recall(store, address_of(1), new_slot(20_000), 3) is reason
            assert f"{prefix}/{address_of(1).name}" not in objects(server, prefix)
        assert store.stats().damaged == 5


async def test_a_slot_that_changes_while_it_is_copied_is_not_sent(server: Server, prefix: str) -> None:
    class Overwritten(S3):
        def write(self, files: Sequence[Outgoing]) -> list[bool | Failed]:
            seal.open_slot(slot, 9)
            return super().write(files)

    slot, column = evicted(address_of(1))
    async with opened(Overwritten(BUCKET, prefix=prefix, endpoint=server.endpoint)) as store:
        assert await spill(store, address_of(1), slot, column) is Miss.TORN
        assert objects(server, prefix) == {}


@pytest.mark.slow
async def test_a_server_that_dies_is_a_reason_and_then_it_works_again(prefix: str) -> None:
    with bucket.running() as server:
        server.make_bucket()
        async with opened(bucket_at(server, prefix)) as store:
            assert await put(store, address_of(1)) == "stored"
            server.kill()
            assert await put(store, address_of(2)) == Outcome.FAILED
            assert await get(store, address_of(1)) == Miss.LOST
            assert await store.exists([address_of(3)]) == [False]
            with pytest.raises(Failed, match="unreachable"):
                await store.purge(tag=ACME)
            assert set(store.stats().faults) == {"unreachable"}
            server.start()
            assert await put(store, address_of(2)) == Outcome.FAILED, "its bucket is gone"
            assert store.stats().faults["vanished"] == 1
            server.make_bucket()
            assert await put(store, address_of(2)) == "stored"
            assert await get(store, address_of(2)) == "hit"
            assert await get(store, address_of(1)) == Miss.ABSENT


async def test_a_server_that_dies_in_the_middle_of_an_answer_is_a_reason(prefix: str) -> None:
    """It promises a column and gives half of it."""
    date = "Last-Modified: Tue, 01 Apr 2025 00:00:00 GMT"
    head = f"HTTP/1.1 200 OK\r\nContent-Length: {COLUMN_BYTES}\r\nETag: x\r\n{date}\r\n\r\n"
    with dying_server(head.encode() + bytes(6000)) as (endpoint, _):
        store = make(Tier2Settings("s3", 1 << 30, bucket=BUCKET, prefix=prefix, endpoint=endpoint))
        slot = new_slot()
        assert await recall(store, address_of(1), slot, 3) is Miss.LOST
        assert not any(slot)
        assert set(store.stats().faults) == {"unreachable"}
        await store.close()


async def test_an_object_whose_answer_was_lost_is_not_left_uncounted(prefix: str) -> None:
    with dying_server(b"") as (endpoint, requests):
        store = make(Tier2Settings("s3", 1 << 30, bucket=BUCKET, prefix=prefix, endpoint=endpoint))
        assert await put(store, address_of(1)) == Outcome.FAILED
        assert requests[-1].startswith(b"POST /columns?delete")
        assert store.stats().bytes == 0
        await store.close()


async def test_an_answer_that_the_library_panics_over_is_a_reason(prefix: str) -> None:
    """That is no Exception. A column whose removal never ends would keep its store from purging."""
    error = b"<Error><Key>of another</Key><Code>X</Code><Message>no</Message></Error>"
    body = b"<DeleteResult>%s</DeleteResult>" % error
    with dying_server(ok(b""), ok(body)) as (endpoint, _):
        store = make(Tier2Settings("s3", 1 << 30, bucket=BUCKET, prefix=prefix, endpoint=endpoint))
        assert await put(store, address_of(1)) == "stored"
        with pytest.raises(Failed, match="panicked"):
            await store.delete([address_of(1)])
        assert store.knows(address_of(1))
        async with asyncio.timeout(30):
            with pytest.raises(Failed):  # as its answers are
                await store.purge(tag=ACME)
            await store.close()


def test_a_listing_that_never_ends_is_a_reason(prefix: str) -> None:
    """Each page says that another one follows, and it is always the same one."""
    names = [f"{prefix}/{address_of(number).name}" for number in range(3)]
    more = b"<IsTruncated>true</IsTruncated><NextContinuationToken>x</NextContinuationToken>"
    with dying_server(ok(listing(*names, more=more)), ok(DELETED)) as (endpoint, _):
        backend = S3("tier2", prefix=prefix, endpoint=endpoint)
        with pytest.raises(Failed, match="again and again"):
            list(backend.files())
        with pytest.raises(Failed, match="again and again"):
            backend.purge(Scope(namespace=NAMESPACE))


def test_the_mark_of_a_folder_is_not_what_a_purge_leaves(server: Server, prefix: str) -> None:
    """Consoles of buckets make them, and the library can't remove them."""
    folder = f"{NAMESPACE.hex()}/{ACME.hex()}/"
    server.put_object(f"{prefix}/{folder}", b"")
    backend = bucket_at(server, prefix)
    backend.write([Outgoing(address_of(1).name, [memoryview(bytes(4096))], lambda: True)])
    assert [one.address for one in backend.files()] == [address_of(1)]
    assert backend.purge(Scope(ACME, NAMESPACE)) == Removed(1, 4096)
    assert backend.purge(Scope(tag=ACME)) == Removed(0, 0)


def test_an_object_that_the_library_cannot_list_is_named(server: Server, prefix: str) -> None:
    server.put_object(f"{prefix}/a//b", b"x")
    with pytest.raises(Failed, match=f"{prefix}/a//b.*remove it from the bucket"):
        list(bucket_at(server, prefix).files())


@pytest.mark.parametrize(
    ("status", "code"),
    [
        ("403 Forbidden", "QuotaExceeded"),
        ("507 Insufficient Storage", "XMinioStorageFull"),
        ("400 Bad Request", "XMinioAdminBucketQuotaExceeded"),
    ],
)
def test_a_bucket_that_is_full_is_listed_and_purged(prefix: str, status: str, code: str) -> None:
    items = listing(f"{prefix}/{address_of(1).name}")
    full = refused(status, code)
    with dying_server(ok(items), ok(DELETED), full) as (endpoint, asked):
        backend = S3("tier2", prefix=prefix, endpoint=endpoint)
        backend.open()
        assert [one.address for one in backend.files()] == [address_of(1)]
        with pytest.raises(Failed, match="others keep writing"):  # as it goes on showing it
            backend.purge(Scope(namespace=NAMESPACE))
        assert any(one.startswith(b"POST") for one in asked)
        (answer,) = backend.write([Outgoing(address_of(2).name, [memoryview(b"x")], lambda: True)])
        assert isinstance(answer, Failed)
        assert answer.fault is Fault.NO_SPACE


def test_a_bucket_that_is_full_and_shows_nothing_confirms_no_purge(prefix: str) -> None:
    full = refused("507 Insufficient Storage", "XMinioStorageFull")
    with dying_server(ok(b"<html>Down.</html>"), to_puts=full) as (endpoint, _):
        backend = S3("tier2", prefix=prefix, endpoint=endpoint)
        backend.open()
        with pytest.raises(Failed) as failed:
            backend.purge(Scope(namespace=NAMESPACE))
        assert failed.value.fault is Fault.NO_SPACE


def ok(body: bytes) -> bytes:
    """Said to be the last on its connection, else the next request may go there, and is lost."""
    head = b'HTTP/1.1 200 OK\r\nconnection: close\r\netag: "e"\r\ncontent-length: %d\r\n\r\n'
    return head % len(body) + body


def refused(status: str, code: str = "X") -> bytes:
    body = f"<Error><Code>{code}</Code></Error>".encode()
    head = b"HTTP/1.1 %s\r\nconnection: close\r\ncontent-length: %d\r\n\r\n"
    return head % (status.encode(), len(body)) + body


def listing(*names: str, more: bytes = b"", size: int = COLUMN_BYTES) -> bytes:
    facts = f"<LastModified>2026-01-01T00:00:00Z</LastModified><Size>{size}</Size>"
    items = "".join(f"<Contents><Key>{name}</Key>{facts}</Contents>" for name in names)
    return b"<ListBucketResult><Name>tier2</Name>%s%s</ListBucketResult>" % (more, items.encode())


@contextlib.contextmanager
def dying_server(
    answer: bytes, to_deletes: bytes = b"", to_puts: bytes = b""
) -> Iterator[tuple[str, list[bytes]]]:
    """Gives every request the start of an answer, and hangs up. Its endpoint, and what it was asked."""
    requests: list[bytes] = []

    def serve() -> None:
        with contextlib.suppress(OSError):  # it is closed at the end
            while True:
                connection, _ = listener.accept()
                with connection:
                    requests.append(connection.recv(65_536))
                    method = requests[-1].partition(b" ")[0]
                    connection.sendall({b"POST": to_deletes, b"PUT": to_puts}.get(method) or answer)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}", requests
        finally:  # else whoever fails meanwhile waits for it for ever
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()


@pytest.mark.parametrize(
    ("status", "fault"), [("403 Forbidden", Fault.DENIED), ("404 Not Found", Fault.VANISHED)]
)
def test_a_listing_that_is_refused_says_why(prefix: str, status: str, fault: Fault) -> None:
    """Credentials without the right to list are no matter of the network."""
    with dying_server(refused(status)) as (endpoint, _):
        with pytest.raises(Failed) as failed:
            S3("tier2", prefix=prefix, endpoint=endpoint).purge(Scope(tag=bytes(16)))
        assert failed.value.fault is fault


def test_a_page_that_is_no_listing_confirms_no_purge(prefix: str) -> None:
    """As a proxy before the service has it, and says that it is down."""
    with dying_server(ok(b"<html>Down for maintenance.</html>"), ok(DELETED)) as (endpoint, asked):
        backend = S3("tier2", prefix=prefix, endpoint=endpoint)
        for scope in (Scope(tag=bytes(16)), Scope(namespace=NAMESPACE), Scope(ACME, NAMESPACE)):
            with pytest.raises(Failed) as failed:
                backend.purge(scope)
            assert failed.value.fault is Fault.UNREACHABLE
        with pytest.raises(Failed):
            list(backend.files())
        assert any(b"list-type" in one for one in asked)


def test_what_another_agent_puts_there_to_check_a_listing_is_left(server: Server, prefix: str) -> None:
    backend = bucket_at(server, prefix)
    name = f"{NAMESPACE.hex()}/.probe-of-another"
    obstore.put(backend._store, name, b"probe")
    assert backend.purge(Scope(namespace=NAMESPACE)) == Removed(0, 0)
    assert list(objects(server, prefix)) == [f"{prefix}/{name}"]
    with mock.patch("kvss_agent.tier2.s3.PROBE_KEPT", timedelta(hours=-1)):
        assert backend.purge(Scope(namespace=NAMESPACE)) == Removed(0, 5)
    assert list(objects(server, prefix)) == []


async def test_a_bucket_that_keeps_versions_is_refused(server: Server, prefix: str) -> None:
    server.make_bucket("versioned")
    server.keep_versions("versioned")
    backend = S3("versioned", prefix=prefix, endpoint=server.endpoint)
    with pytest.raises(Failed, match="old versions"):
        backend.open()


async def test_a_bucket_that_does_not_exist_is_refused(server: Server, prefix: str) -> None:
    with pytest.raises(Failed, match="vanished"):
        S3("nobodys", prefix=prefix, endpoint=server.endpoint).open()


async def test_settings_make_a_store_in_a_bucket(server: Server, prefix: str) -> None:
    settings = Tier2Settings("s3", 1 << 30, bucket=BUCKET, prefix=prefix, endpoint=server.endpoint)
    store = make(settings)
    await store.open()
    assert await put(store, address_of(1)) == "stored"
    await store.close()


def test_without_the_extra_a_sentence_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    monkeypatch.delitem(sys.modules, "kvss_agent.tier2.s3", raising=False)
    with pytest.raises(NotInstalled, match=r"tidegate\[s3\]"):
        make(Tier2Settings("s3", 1 << 30, bucket=BUCKET))
