"""What a driver may rely on, over every transport."""

from __future__ import annotations

import contextlib
import dataclasses
import socket
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from pickle import PickleBuffer

import pytest

from kvss_agent.client import (
    WAIT_SECONDS,
    Evict,
    Header,
    Lost,
    Miss,
    NotApplied,
    ShardClient,
    Wanted,
)
from kvss_agent.client.connection import AgentConnection, Credentials, opened
from kvss_agent.data_plane import wire
from kvss_agent.data_plane.address import Address
from kvss_agent.data_plane.breach import Cause
from kvss_agent.data_plane.channel import AnyChannel
from kvss_agent.data_plane.wire import Role
from kvss_agent.shard import seal
from kvss_agent.shard.arena import slot_bytes_for
from tests.kvss_agent.plane import (
    DRIVER,
    PAYLOAD,
    READER,
    SECRET,
    TAG,
    Plane,
    column,
    kv,
    place,
    running,
)
from tests.live import wait_until

SHARED = ["shm", "shm native"]
STREAMS = ["unix", "tcp"]
KINDS = [*SHARED, *STREAMS]


@pytest.fixture
def plane(tmp_path: Path) -> Iterator[Plane]:
    with running(tmp_path) as plane:
        plane.add()
        yield plane


def _has_served(plane: Plane, expected: tuple[int, int]) -> bool:
    return plane.plane.served == expected


def is_lost(client: ShardClient) -> bool:
    try:
        client.evict(7, column("c").key, TAG, 64, kv())
    except Lost:
        return True
    return False


@pytest.mark.parametrize("kind", KINDS)
def test_what_goes_out_comes_back(plane: Plane, kind: str) -> None:
    payload = kv()
    with plane.client(kind) as shard:
        assert shard.transport == kind.split(maxsplit=1)[0]
        assert (shard.slots, shard.payload_bytes_max) == (8, slot_bytes_for(PAYLOAD) - 64)
        number = shard.evict(3, column("a").key, TAG, 64, payload)
        shard.wait_applied(number)
        into = place()
        [found] = shard.refill([Wanted(3, column("a", number))], [into])
        assert isinstance(found, Header)
        assert (found.tokens, found.length, into) == (64, PAYLOAD, payload)
        with shard.view([Wanted(3, column("a", number))]) as [view]:
            assert view == payload
            assert isinstance(view, memoryview)
            assert view.readonly
    wait_until("nobody is connected", lambda: plane.plane.connections == 0)
    assert plane.breaches() == {}


@pytest.mark.parametrize("kind", KINDS)
def test_an_agent_sees_that_somebody_evicts_and_refills(plane: Plane, kind: str) -> None:
    """Also who connects anew. What lies in slots of fragments is the agents' own."""
    fragments = plane.add("fragments")
    fragments.identity = dataclasses.replace(fragments.identity, is_for_fragments=True)
    for _ in range(2):
        with plane.client(kind, "fragments") as shard:
            before = plane.plane.served
            number = shard.evict(3, column("a").key, TAG, 64, kv())
            shard.wait_applied(number)
            shard.requests.refill([Wanted(3, column("a", number))], [place()], number, 1.0)
            assert plane.plane.served == before
        with plane.client(kind) as shard:
            number = shard.evict(3, column("a").key, TAG, 64, kv())
            shard.wait_applied(number)
            expected = before[0] + 1, before[1] + PAYLOAD
            assert plane.plane.served == (expected[0], before[1])
            [found] = shard.requests.refill([Wanted(3, column("a", number))], [place()], number, 1.0)
            assert isinstance(found, Header)
            # Its agent counts it once it has sent it.
            wait_until("it is counted", partial(_has_served, plane, expected))


@pytest.mark.parametrize("kind", KINDS)
def test_a_refill_comes_after_the_evict_that_wrote_it_without_being_told_to_wait(
    plane: Plane, kind: str
) -> None:
    with plane.client(kind) as shard:
        for round_ in range(20):
            payload, into = kv(), place()
            number = shard.evict(round_ % 8, column("a").key, TAG, 64, payload)
            [found] = shard.refill([Wanted(round_ % 8, column("a", number))], [into])
            assert isinstance(found, Header)
            assert into == payload


@pytest.mark.parametrize("kind", KINDS)
def test_batches_larger_than_a_frame_and_tails_of_any_length(plane: Plane, kind: str) -> None:
    plane.add("large", slots=200, payload=4096)
    payloads = [kv(1 + 20 * index) for index in range(150)]
    with plane.client(kind, "large") as shard:
        last = shard.evict_batch(
            [
                Evict(index, column(f"{index}").key, TAG, 1, payload)
                for index, payload in enumerate(payloads)
            ]
        )
        assert last == 150
        wanted = [Wanted(index, column(f"{index}", index + 1)) for index in range(150)]
        places = [place(4096) for _ in wanted]
        found = shard.refill(wanted, places)
        for one, into, payload in zip(found, places, payloads, strict=True):
            assert isinstance(one, Header)
            assert into[: one.length] == payload


@pytest.mark.parametrize("kind", KINDS)
def test_every_miss_has_its_reason(plane: Plane, kind: str) -> None:
    with plane.client(kind) as shard:
        shard.evict(0, column("a").key, TAG, 64, kv())
        number = shard.evict(1, column("b").key, TAG, 64, kv())
        shard.wait_applied(number)
        plane.shards["s"].arena.slot(1)[100] ^= 1
        wanted = [
            Wanted(0, column("b", 1)),
            Wanted(0, column("a", 2)),
            Wanted(0, column("a", 1, tag=b"o" * 16)),
            Wanted(2, column("a", 1)),
            Wanted(99, column("a", 1)),
            Wanted(1, column("b", 2)),
        ]
        found = shard.refill(wanted, [place() for _ in wanted])
        assert found[:5] == [Miss.STALE, Miss.STALE, Miss.FOREIGN, Miss.ABSENT, Miss.ABSENT]
        assert found[5] in (Miss.TORN, Miss.CORRUPT)
        seal.open_slot(plane.shards["s"].arena.slot(0), 3)
        assert shard.refill([Wanted(0, column("a", 1))], [place()]) == [Miss.TORN]


@pytest.mark.parametrize("kind", KINDS)
def test_a_delete_empties_and_scrubs_and_takes_nothing_newer(plane: Plane, kind: str) -> None:
    memory = plane.shards["s"].arena.slot(0)
    with plane.client(kind) as shard:
        number = shard.evict(0, column("a").key, TAG, 64, kv())
        assert shard.delete([0, 1], scrub=True) is None
        assert shard.refill([Wanted(0, column("a", number))], [place()]) == [Miss.ABSENT]
        assert bytes(memory) == bytes(len(memory))
        number = shard.evict(0, column("a").key, TAG, 64, kv())
        assert isinstance(shard.refill([Wanted(0, column("a", number))], [place()])[0], Header)


@pytest.mark.parametrize("first", KINDS)
@pytest.mark.parametrize("second", KINDS)
def test_a_driver_that_connects_anew_goes_on_where_it_was(plane: Plane, first: str, second: str) -> None:
    payload = kv()
    with plane.client(first) as before:
        before.wait_applied(before.evict(0, column("a").key, TAG, 64, payload))
        with plane.client(second) as after:
            assert after.applied == 1
            assert after.incarnation == before.incarnation
            into = place()
            assert isinstance(after.refill([Wanted(0, column("a", 1))], [into])[0], Header)
            assert into == payload
            assert after.evict(1, column("b").key, TAG, 64, kv()) == 2
            wait_until("the earlier client is lost", lambda: is_lost(before))
    assert plane.breaches().get(Cause.SUPERSEDED) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_a_delete_takes_what_a_driver_left_that_died_while_it_was_writing(
    plane: Plane, kind: str
) -> None:
    arena = plane.shards["s"].arena
    with plane.client(kind) as shard:
        shard.wait_applied(shard.evict(0, column("a").key, TAG, 64, kv()))
        seal.write(arena.slot(1), column("b", 2), 64, kv())  # sealed, and never counted
        seal.open_slot(arena.slot(2), 2)
        assert shard.delete([0, 1, 2], scrub=True) is None
    assert not any(any(arena.slot(slot)) for slot in (0, 1, 2))


@pytest.mark.parametrize("kind", SHARED)
def test_a_client_that_leaves_takes_all_its_descriptors_with_it(plane: Plane, kind: str) -> None:
    def descriptors() -> int:
        return sum(1 for _ in Path("/proc/self/fd").iterdir())

    before = descriptors()
    for _ in range(3):
        with plane.client(kind) as shard:
            shard.evict(0, column("a").key, TAG, 64, kv())
            assert shard.delete([0]) is None
            shard.close()  # and again on the way out
    wait_until("they are closed", lambda: descriptors() <= before)


@pytest.mark.parametrize("kind", SHARED)
def test_a_client_that_cannot_follow_its_line_is_lost_and_says_so(plane: Plane, kind: str) -> None:
    def refuse(slots: int) -> None:
        raise ZeroDivisionError(slots)

    with plane.client(kind) as shard:
        shard.on_slot_limit = refuse
        plane.shards["s"].resize(9)
        wait_until("it is lost", lambda: is_lost(shard))
        with pytest.raises(Lost, match="ZeroDivisionError"):
            shard.evict(0, column("a").key, TAG, 64, kv())


@pytest.mark.parametrize("kind", KINDS)
def test_a_line_that_moves_down_and_up_again(plane: Plane, kind: str) -> None:
    hosted = plane.shards["s"]
    with plane.client(kind) as shard:
        for slot in range(8):
            number = shard.evict(slot, column(f"{slot}").key, TAG, 64, kv())
        shard.wait_applied(number)
        hosted.resize(3)
        assert hosted.arena.slots == 3
        found = shard.refill(
            [Wanted(slot, column(f"{slot}", slot + 1)) for slot in (2, 3)], [place(), place()]
        )
        assert isinstance(found[0], Header)
        assert found[1] is Miss.ABSENT
        assert shard.evict(5, column("x").key, TAG, 64, kv()) == 9  # above the line: nowhere
        shard.wait_applied(9)
        hosted.resize(12)
        if kind in SHARED:
            wait_until("the driver knows of the new line", lambda: shard.slots == 12)
        payload, into = kv(), place()
        number = shard.evict(11, column("y").key, TAG, 64, payload)
        found = shard.refill(
            [Wanted(11, column("y", number)), Wanted(5, column("5", 6))], [into, place()]
        )
        assert isinstance(found[0], Header)
        assert into == payload
        assert found[1] is Miss.ABSENT


def test_a_shard_that_grows_again_before_it_has_shrunk_keeps_what_it_needs(
    plane: Plane, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader above the line delays the giving back; it ends while the arena is growing. What was in
    memory that is kept so is gone as if it had been given back."""
    hosted = plane.shards["s"]
    with plane.client("unix") as shard:
        shard.wait_applied(shard.evict(5, column("a").key, TAG, 64, kv()))
    lease = hosted.core.leases.take([6], time.monotonic() + 30)
    hosted.resize(3)
    assert (hosted.core.slots, hosted.arena.slots) == (3, 8)
    grow = hosted.arena.grow

    def grow_while_the_reader_ends(*arguments: object, **more: object) -> object:
        grown = grow(*arguments, **more)  # type: ignore[arg-type]
        hosted.done(lease, None)
        return grown

    monkeypatch.setattr(hosted.arena, "grow", grow_while_the_reader_ends)
    hosted.resize(12)
    assert (hosted.core.slots, hosted.arena.slots) == (12, 12)
    assert not any(hosted.arena.slot(5))
    with plane.client("unix") as shard:
        for slot in range(12):
            shard.wait_applied(shard.evict(slot, column("a").key, TAG, 64, kv()))


def test_a_reader_may_read_and_nothing_else(plane: Plane) -> None:
    with plane.client("unix") as shard:
        shard.wait_applied(shard.evict(0, column("a").key, TAG, 64, kv()))
    with plane.client("unix", driver=READER, write=False) as reader:
        assert isinstance(reader.refill([Wanted(0, column("a", 1))], [place()])[0], Header)
        with pytest.raises(Lost, match="Delete is not allowed here"):
            reader.delete([0])
    with (
        pytest.raises(Lost, match="may not use this shard in this role"),
        plane.client("unix", driver=READER),
    ):
        pass
    with (
        pytest.raises(Lost, match="may not use this shard in this role"),
        plane.client("shm", driver=READER),
    ):
        pass


def test_who_does_not_know_the_secret_is_told_nothing_about_shards(plane: Plane) -> None:
    address = Address(path=str(plane.unix))
    for credentials in (Credentials("nobody", SECRET), Credentials(DRIVER, SECRET + b"!")):
        for shard in ("s", "none"):
            with pytest.raises(Lost, match="secret") as caught:
                AgentConnection(address, shard, credentials, Role.REFILL)
            assert caught.value.cause is Cause.AUTHENTICATION
    with pytest.raises(Lost, match="there is no shard none here") as caught:
        AgentConnection(address, "none", Credentials(DRIVER, SECRET), Role.REFILL)
    assert caught.value.cause is Cause.ABSENT


def test_an_agent_that_does_not_know_the_secret_gets_no_bytes(tmp_path: Path, plane: Plane) -> None:
    """Somebody else listens at the agent's address, and answers with a proof that is none."""
    path = tmp_path / "impostor.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen(1)

        def pretend() -> None:
            peer, _ = listener.accept()
            with peer:
                peer.recv(1000)
                peer.sendall(wire.Challenge(2, wire.Means.SECRET, 0, bytes(32), bytes(32)).encode())
                assert peer.recv(1000) == b"", "the driver says nothing more"

        thread = threading.Thread(target=pretend)
        thread.start()
        with pytest.raises(Lost, match="does not know the secret"):
            AgentConnection(Address(path=str(path)), "s", Credentials(DRIVER, SECRET), Role.EVICT)
        thread.join()


@pytest.mark.parametrize("kind", STREAMS)
@pytest.mark.parametrize(("versions", "spoken"), [((1, 1), 1), ((1, 2), 2), ((2, 3), 2)])
def test_neighbouring_versions_speak_with_each_other(
    plane: Plane, kind: str, versions: tuple[int, int], spoken: int
) -> None:
    with plane.client(kind, versions=versions) as shard:
        assert shard.requests.connection.version == spoken
        payload, into = kv(), place()
        number = shard.evict(0, column("a").key, TAG, 64, payload)
        shard.wait_applied(number)
        assert isinstance(shard.refill([Wanted(0, column("a", number))], [into])[0], Header)
        assert into == payload


def test_versions_too_far_apart_say_so(plane: Plane) -> None:
    with pytest.raises(Lost, match="versions 3 to 4, this agent 1 to 2"), plane.client(versions=(3, 4)):
        pass
    assert plane.breaches() == {Cause.VERSION: 1}


def test_a_refill_of_what_never_comes_is_late(plane: Plane) -> None:
    with plane.client("unix") as shard:
        began = time.monotonic()
        found = shard.refill([Wanted(0, column("a", 7))], [place()])
        assert found == [Miss.LATE]
        assert time.monotonic() - began > WAIT_SECONDS - 0.05, "it has not waited"
        with pytest.raises(ValueError, match="there was no evict 5"):
            shard.wait_applied(5)


def test_many_threads_share_one_client(plane: Plane) -> None:
    plane.add("many", slots=64, payload=4096)
    with plane.client("unix", "many") as shard:
        payloads = [kv(4096) for _ in range(64)]
        for slot, payload in enumerate(payloads):
            shard.evict(slot, column(f"{slot}").key, TAG, 64, payload)
        wrong: list[int] = []

        def read(start: int) -> None:
            for index in range(200):
                slot = (start + index) % 64
                into = place(4096)
                [found] = shard.refill([Wanted(slot, column(f"{slot}", slot + 1))], [into])
                if not isinstance(found, Header) or into != payloads[slot]:
                    wrong.append(slot)

        threads = [threading.Thread(target=read, args=(start,)) for start in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []


@pytest.mark.parametrize("kind", SHARED)
def test_an_evict_to_a_slot_that_is_read_in_place_waits_for_the_reader(plane: Plane, kind: str) -> None:
    with plane.client(kind) as shard:
        payload = kv()
        number = shard.evict(0, column("a").key, TAG, 64, payload)
        views = shard.view([Wanted(0, column("a", number))])
        thread = threading.Thread(target=shard.evict, args=(0, column("b").key, TAG, 64, kv()))
        thread.start()
        thread.join(0.1)
        assert thread.is_alive()
        assert views.columns == [payload]
        views.release()
        thread.join(60)
        assert shard.refill([Wanted(0, column("a", number))], [place()]) == [Miss.STALE]


def test_views_over_a_stream_share_memory_one_after_the_other_and_never_at_once(plane: Plane) -> None:
    with plane.client("tcp") as shard:
        payloads = [kv(), kv(), kv()]
        wanted = [
            [Wanted(slot, column(f"{slot}", shard.evict(slot, column(f"{slot}").key, TAG, 64, payload)))]
            for slot, payload in enumerate(payloads)
        ]
        first = shard.view(wanted[0])
        [kept] = first.columns
        with shard.view(wanted[1]) as [other]:
            assert (kept, other) == (payloads[0], payloads[1])
        first.release()
        with pytest.raises(ValueError, match="released"):
            bytes(kept)  # type: ignore[arg-type]
        last = shard.view(wanted[2])
        [column_in_use] = last.columns
        assert isinstance(column_in_use, memoryview)
        reader = PickleBuffer(column_in_use)
        last.release()
        with shard.view(wanted[0]) as [again]:
            assert again == payloads[0]
            assert reader.raw() == payloads[2], "who still reads it keeps it"


@pytest.mark.parametrize("kind", SHARED)
def test_a_client_that_is_closed_while_it_is_used_is_lost_and_nothing_worse(
    plane: Plane, kind: str
) -> None:
    counts: list[int] = []

    def forever(call: Callable[[], object]) -> None:
        while call():
            counts.append(1)

    def work(call: Callable[[], object]) -> None:
        with pytest.raises(Lost, match="was closed"):
            forever(call)

    with plane.client(kind) as shard:
        payload, into = kv(), place()
        shard.evict(0, column("a").key, TAG, 64, payload)
        calls: list[Callable[[], object]] = [
            lambda: shard.evict(1, column("b").key, TAG, 64, payload),
            lambda: shard.evict_batch([Evict(2, column("c").key, TAG, 64, payload)]),
            lambda: shard.refill([Wanted(0, column("a", 1))], [into]),
        ]
        threads = [threading.Thread(target=work, args=(call,)) for call in calls]
        for thread in threads:
            thread.start()
        wait_until("it is used", lambda: len(counts) > 100)
        shard.close()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()


def test_two_drivers_cannot_have_one_shard(plane: Plane) -> None:
    plane.secrets["job-2"] = SECRET
    plane.plane.secrets = plane.secrets
    with plane.client("unix"), pytest.raises(Lost) as caught, plane.client("unix", driver="job-2"):
        pass
    assert caught.value.cause is Cause.AUTHENTICATION


def test_an_agent_that_ends_is_lost_at_once(plane: Plane) -> None:
    with plane.client("unix") as stream:
        plane.shards["s"].end(Cause.GONE, "the shard was removed")
        del plane.shards["s"]
        with pytest.raises(Lost, match="was removed") as caught:
            stream.refill([Wanted(0, column("a", 1))], [place()])
        assert caught.value.cause is Cause.GONE
        with pytest.raises(Lost):
            stream.wait_applied(stream.evict(0, column("a").key, TAG, 64, kv()))


@pytest.mark.parametrize("kind", STREAMS)
def test_a_client_that_asks_for_nothing_knows_that_its_agent_has_ended(plane: Plane, kind: str) -> None:
    with plane.client(kind) as stream:
        assert stream.lost is None
        plane.shards.pop("s").end(Cause.GONE, "the shard was removed")
        wait_until("it is known", lambda: stream.lost is not None)


def test_what_is_not_applied_in_time_says_so(plane: Plane) -> None:
    with plane.client("shm") as shard, pytest.raises(NotApplied):
        shard.wait_applied(1)


def test_who_connects_waits_while_others_fill_the_queue_of_a_unix_socket(tmp_path: Path) -> None:
    """Strangers could otherwise keep a driver out by connecting faster than they are looked at."""
    path = tmp_path / "s"
    channels: list[AnyChannel] = []
    with socket.socket(socket.AF_UNIX) as listener, contextlib.ExitStack() as stack:
        listener.bind(str(path))
        listener.listen(0)
        with contextlib.suppress(BlockingIOError):
            while True:  # until the queue is full
                stranger = stack.enter_context(socket.socket(socket.AF_UNIX))
                stranger.setblocking(False)
                stranger.connect(str(path))
        late = threading.Thread(
            target=lambda: channels.append(opened(Address(path=str(path)), None, 1.0))
        )
        late.start()
        while not channels:
            stack.enter_context(listener.accept()[0])
            late.join(0.05)
            if not late.is_alive():
                break
        assert channels, "it was refused"
        channels[0].close()
