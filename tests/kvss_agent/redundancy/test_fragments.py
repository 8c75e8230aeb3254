"""Column files as fragments on several agents: losing as many as there is parity loses nothing."""

from __future__ import annotations

import contextlib
import itertools
import secrets
import shutil
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvss_agent.client.withdrawal import Withdrawal
from kvss_agent.redundancy.fragments import AT_ONCE, Fragments
from kvss_agent.redundancy.holder import Place
from kvss_agent.redundancy.layout import SLOTS
from kvss_agent.tier2.address import Address, Scope
from kvss_agent.tier2.backend import Failed, Fault, Outgoing, look_at
from tests.kvss_agent.redundancy.holders import NAMES, NAMESPACE, PART, SLOT, World, running
from tests.live import wait_until

TAG = b"t" * 16


@pytest.fixture(params=[(2, 1), (3, 2), (1, 1)], ids=["2+1", "3+2", "1+1"])
def world(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[World]:
    with running(tmp_path, *request.param) as made:
        yield made


@pytest.fixture
def small(tmp_path: Path) -> Iterator[World]:
    with running(tmp_path, 2, 1) as made:
        yield made


@pytest.fixture
def fragments(world: World) -> Iterator[Fragments]:
    found = world.fragments()
    found.open()
    yield found
    found.close()


def address(number: int, tag: bytes = TAG) -> Address:
    return Address(NAMESPACE, tag, number.to_bytes(16), PART)


def outgoing(number: int, content: bytes, tag: bytes = TAG, *, intact: bool = True) -> Outgoing:
    """In three parts, as a column's file has."""
    memory = memoryview(bytearray(content))
    parts = [memoryview(bytes(memory[:64])), memory[64:-100], memoryview(bytes(memory[-100:]))]
    return Outgoing(address(number, tag).name, parts, lambda: intact)


def content(size: int = SLOT) -> bytes:
    return secrets.token_bytes(size)


def read(fragments: Fragments, numbers: Sequence[int]) -> list[bytes | Failed | None]:
    memories = [memoryview(bytearray(SLOT + 4096)) for _ in numbers]
    files = [
        (address(number).name, [memory[:64], memory[64:]])
        for number, memory in zip(numbers, memories, strict=True)
    ]
    return [
        bytes(memory[:size]) if isinstance(size, int) else size
        for memory, size in zip(memories, fragments.read(files), strict=True)
    ]


def stop_any(world: World) -> Iterator[None]:
    """Each way to lose as many agents as there is parity, one after the other."""
    for lost in itertools.combinations(world.agents, world.parity):
        for one in lost:
            one.stop()
        yield
        for one in lost:
            one.start()


def test_what_is_written_is_read_whatever_its_size(fragments: Fragments) -> None:
    contents = [content(size) for size in (4096, SLOT, 8192, SLOT + 4096)]
    files = [outgoing(number, one) for number, one in enumerate(contents)]
    assert fragments.write(files) == [True] * 4
    assert read(fragments, range(4)) == contents
    assert fragments.incomplete == 0


def test_no_agent_has_two_fragments_and_none_has_the_column(fragments: Fragments, world: World) -> None:
    assert fragments.write([outgoing(1, content())]) == [True]
    its = [one.names for one in world.agents]
    assert all(len(names) == 1 for names in its)
    assert len({name for names in its for name in names}) == len(world.agents)
    if world.data > 1:
        sizes = [(one.folder / one.names[0]).stat().st_size for one in world.agents]
        assert max(sizes) <= SLOT // world.data + 2 * 4096


def test_losing_as_many_agents_as_there_is_parity_loses_nothing(world: World) -> None:
    before = world.fragments()
    contents = [content(), content(4096)]
    assert before.write([outgoing(number, one) for number, one in enumerate(contents)]) == [True] * 2
    before.close()
    for _ in stop_any(world):
        fragments = world.fragments()
        fragments.open()
        assert read(fragments, range(2)) == contents
        assert sum(one.is_away for one in fragments.holders) <= world.parity
        fragments.close()


def test_one_more_is_a_failure_and_none_of_the_file_s(fragments: Fragments, world: World) -> None:
    one = content()
    assert fragments.write([outgoing(1, one)]) == [True]
    for agent in world.agents[: world.parity + 1]:
        agent.stop()
    (found,) = read(fragments, [1])
    assert isinstance(found, Failed)
    assert found.fault is Fault.UNREACHABLE
    with pytest.raises(Failed):
        look_at(fragments, address(1).name)


def test_what_holders_have_that_are_opening_their_stores_is_not_absent(
    fragments: Fragments, world: World
) -> None:
    """They are there again, and list what they have: who asks them meanwhile knows nothing."""
    one = content()
    assert fragments.write([outgoing(1, one)]) == [True]
    with contextlib.ExitStack() as opening:
        for agent in world.agents[: world.parity + 1]:
            opening.enter_context(agent.opening())
        with pytest.raises(Failed):
            look_at(fragments, address(1).name)
        (answer,) = fragments.write([outgoing(1, content())])
        assert isinstance(answer, Failed)
    assert all(len(agent.names) == 1 for agent in world.agents)
    assert read(fragments, [1]) == [one]


def test_what_is_gone_on_too_many_disks_is_absent(fragments: Fragments, world: World) -> None:
    assert fragments.write([outgoing(1, content())]) == [True]
    for agent in world.agents[: world.parity + 1]:
        (agent.folder / agent.names[0]).unlink()
    assert read(fragments, [1]) == [None]


def test_a_damaged_fragment_costs_nothing_but_its_repair(fragments: Fragments, world: World) -> None:
    one = content()
    assert fragments.write([outgoing(1, one)]) == [True]
    agent = world.agents[0]
    path = agent.folder / agent.names[0]
    damaged = bytearray(path.read_bytes())
    damaged[1000] ^= 1
    path.write_bytes(damaged)
    assert read(fragments, [1]) == [one]
    assert fragments.incomplete == 1
    assert fragments.repair([address(1).name]) > 0
    assert (fragments.incomplete, fragments.repaired) == (0, 1)
    for other in world.agents[1 : 1 + world.parity]:
        (other.folder / other.names[0]).unlink()
    assert read(fragments, [1]) == [one]


def test_fragments_of_two_writes_are_never_mixed(small: World) -> None:
    """An agent that was away has the one before, and the others had lost it."""
    fragments = small.fragments()
    fragments.open()
    first, second = content(), content()
    assert fragments.write([outgoing(1, first)]) == [True]
    small.agents[0].stop()
    for agent in small.agents[1:]:
        agent.stop()
        (agent.folder / agent.names[0]).unlink()
        agent.start()
    other = small.fragments()
    assert other.write([outgoing(1, second)]) == [True]
    assert other.incomplete == 1
    small.agents[0].start()
    later = small.fragments()
    assert read(later, [1]) == [second]
    assert later.repair([address(1).name]) > 0
    small.agents[1].stop()
    assert read(small.fragments(), [1]) == [second]


def test_what_another_driver_has_stored_is_not_replaced(fragments: Fragments, world: World) -> None:
    first = content()
    assert fragments.write([outgoing(1, first)]) == [True]
    assert world.fragments("other").write([outgoing(1, content())]) == [True]
    assert read(fragments, [1]) == [first]
    for agent in world.agents[: world.parity]:
        agent.stop()
    other = world.fragments("other")
    assert other.write([outgoing(1, content())]) == [True]
    assert read(other, [1]) == [first]
    for agent in world.agents[world.parity : world.parity + 1]:
        agent.stop()
    if world.data > 1:  # some of it is left, and nobody can tell whether it is enough
        (answer,) = world.fragments().write([outgoing(1, content())])
        assert isinstance(answer, Failed)
        for agent in world.agents[: world.parity + 1]:
            agent.start()
        assert read(world.fragments(), [1]) == [first]


def test_drivers_that_store_one_column_at_once_do_not_destroy_it(world: World) -> None:
    count = 24
    ones = [world.fragments(name) for name in NAMES]
    contents = [[content(4096) for _ in range(count)] for _ in ones]
    with ThreadPoolExecutor(2) as threads:
        results = threads.map(
            lambda fragments, its: fragments.write([outgoing(n, one) for n, one in enumerate(its)]),
            ones,
            contents,
        )
        stored = list(zip(*results, strict=True))
    found = read(world.fragments(), range(count))
    for number, one in enumerate(found):
        assert one is None or one in {its[number] for its in contents} or isinstance(one, Failed)
        if True in stored[number]:
            assert isinstance(one, bytes), f"column {number}"


def test_a_fragment_of_another_write_is_replaced_wherever_it_is(world: World) -> None:
    """Two drivers store a column at once, and one of them is first at the last holder."""
    fragments, other = world.fragments(), world.fragments("other")
    contents, last = [content(), content()], len(world.agents) - 1

    def is_first() -> bool:
        assert other.write([outgoing(1, contents[1])]) == [True]
        other.holders.delete([address(1)], range(last))
        return True

    assert fragments.write([outgoing(1, contents[0])._replace(intact=is_first)]) == [True]
    fragments.repair([address(1).name])
    assert fragments.incomplete == 0
    for agent in world.agents[: world.parity]:
        agent.stop()
    (found,) = read(world.fragments(), [1])
    assert found in contents  # of two copies either is as good


@pytest.mark.parametrize("bad", [0, 1])
def test_a_fragment_that_is_bad_behind_a_good_seal_is_found_out(small: World, bad: int) -> None:
    """It is the first one that is left out, or one before it was."""
    fragments = small.fragments()
    one = content()
    assert fragments.write([outgoing(1, one)]) == [True]
    place = fragments.holders[bad]
    honest = place.refill

    def lies(
        places: Sequence[Place],
        numbers: Sequence[int],
        into: Sequence[memoryview],
        withdrawal: Withdrawal,
    ) -> object:
        found = honest(places, numbers, into, withdrawal)
        for memory in into:
            memory[100] ^= 1
        return found

    place.refill = lies  # type: ignore[method-assign, assignment]
    assert read(fragments, [1]) == [one]
    assert fragments.incomplete == 1
    assert all(len(agent.names) == 1 for agent in small.agents)
    assert fragments.repair([address(1).name]) > 0
    assert (fragments.incomplete, fragments.repaired) == (0, 1)
    place.refill = honest  # type: ignore[method-assign]
    assert read(fragments, [1]) == [one]
    assert fragments.incomplete == 0


def test_a_holder_that_comes_back_with_an_empty_disk_is_repaired(small: World) -> None:
    fragments = small.fragments()
    count = 6
    contents = [content(4096) for _ in range(count)]
    assert fragments.write([outgoing(n, one) for n, one in enumerate(contents)]) == [True] * count
    list(fragments.files())
    assert (fragments.incomplete, fragments.needs_listing) == (0, False)
    agent = small.agents[0]
    (agent.folder / agent.names[0]).unlink()  # one that it has displaced is not stored again
    agent.stop()
    agent.start()
    list(fragments.files())
    assert fragments.incomplete == 0
    agent.stop()
    shutil.rmtree(agent.folder)
    agent.start()
    wait_until_it_needs_listing(fragments)
    assert len(fragments.unreachable()) == 1, "nobody knows yet what it has"
    list(fragments.files())
    assert not fragments.needs_listing
    assert not fragments.unreachable()
    assert fragments.incomplete == count
    assert (sorted(fragments.incomplete_at()), fragments.most_lacking) == ([0, 0, count], 1)
    assert fragments.repair([one.name for one in fragments.some_incomplete(9)]) > 0
    assert (fragments.incomplete, len(agent.names)) == (0, count)


def test_a_holder_that_was_away_when_others_were_listed_is_listed_when_it_is_reached(
    small: World,
) -> None:
    before = small.fragments()
    assert before.write([outgoing(1, content())]) == [True]
    small.agents[0].stop()
    fragments = small.fragments()
    list(fragments.files())
    assert not fragments.needs_listing
    assert len(fragments.unreachable()) == 1
    small.agents[0].start()
    wait_until_it_needs_listing(fragments)
    list(fragments.files())
    assert not fragments.needs_listing
    assert not fragments.unreachable()


def wait_until_it_needs_listing(fragments: Fragments) -> None:
    def is_so() -> bool:
        fragments.reach_holders()
        return fragments.needs_listing

    wait_until("it is reached", is_so, seconds=30)


def test_what_a_holder_lacks_is_known_however_late_it_is_listed_first(small: World) -> None:
    """Also if it is less than half."""
    before = small.fragments()
    count = 6
    contents = [content(4096) for _ in range(count)]
    assert before.write([outgoing(n, one) for n, one in enumerate(contents)]) == [True] * count
    agent = small.agents[0]
    (agent.folder / agent.names[0]).unlink()
    agent.stop()
    fragments = small.fragments()
    list(fragments.files())
    agent.start()
    wait_until_it_needs_listing(fragments)
    list(fragments.files())
    assert (fragments.incomplete, fragments.most_lacking) == (1, 1)


def test_what_can_t_be_repaired_is_tried_again_later_and_not_at_once(small: World) -> None:
    fragments = small.fragments()
    assert fragments.write([outgoing(1, content())]) == [True]
    agent = small.agents[0]
    agent.stop()
    shutil.rmtree(agent.folder)
    agent.cap = 4096
    agent.start()
    wait_until(
        "it is reached", lambda: bool(list(fragments.files())) and not fragments.unreachable(), 30
    )
    read(fragments, [1])
    assert fragments.some_incomplete(9) == [address(1)]
    assert fragments.repair([address(1).name]) > 0
    assert (fragments.incomplete, fragments.some_incomplete(9)) == (1, [])


def test_what_a_holder_has_from_before_its_time_is_removed_and_not_used(small: World) -> None:
    fragments = small.fragments()
    assert fragments.write([outgoing(1, content())]) == [True]
    later = small.fragments()
    for holder in later.holders:
        holder.since = time.time() + 60
    assert list(later.files()) == []
    assert not any(agent.names for agent in small.agents)


def test_what_is_taken_for_older_than_a_holder_is_stored_there_again(small: World) -> None:
    """Its clock is behind that of the console."""
    fragments = small.fragments()
    fragments.open()
    list(fragments.files())
    assert fragments.write([outgoing(number, content(4096)) for number in range(4)]) == [True] * 4
    since = int(time.time()) + 1
    wait_until("a second is over", lambda: time.time() >= since)
    others = range(4, 12)
    assert fragments.write([outgoing(number, content(4096)) for number in others]) == [True] * 8
    fragments.holders[0].since = float(since)
    list(fragments.files())
    assert len(small.agents[0].names) == len(others)
    assert fragments.incomplete_at() == [4, 0, 0]


def test_what_a_holder_has_from_before_its_time_is_not_used_before_it_is_listed_either(
    small: World,
) -> None:
    """It is reached a while before that: what was deleted meanwhile is among it."""
    fragments = small.fragments()
    assert fragments.write([outgoing(1, content())]) == [True]
    later = small.fragments()
    for holder in [*later.holders][1:]:
        holder.since = time.time() + 60
    later.reach_holders()
    assert isinstance(read(later, [1])[0], Failed)
    assert isinstance(later.look([address(1).name])[0], Failed)
    assert list(later.files()) == []
    assert read(later, [1]) == [None]


def test_a_purge_of_a_namespace_finds_what_makes_no_file(small: World) -> None:
    fragments = small.fragments()
    assert fragments.write([outgoing(1, content())]) == [True]
    for agent in small.agents[:2]:
        (agent.folder / agent.names[0]).unlink()
        agent.stop()
        agent.start()
    other = small.fragments()
    other.purge(Scope(namespace=NAMESPACE))
    assert not small.agents[2].names
    small.agents[2].stop()
    with pytest.raises(Failed):
        other.purge(Scope(namespace=NAMESPACE))


def test_a_purge_empties_the_slots_that_fragments_have_passed_through(small: World) -> None:
    fragments = small.fragments()
    assert fragments.write([outgoing(1, content())]) == [True]
    assert all(agent.shard and agent.shard.occupied() for agent in small.agents)
    fragments.purge(Scope(TAG))
    assert not any(agent.shard and agent.shard.occupied() for agent in small.agents)


def test_what_hot_columns_lack_is_not_what_nobody_asks_for(small: World) -> None:
    """Parity is asked for, too, so that its holder displaces something else."""
    fragments = small.fragments()
    assert fragments.write([outgoing(1, content())]) == [True]
    store = small.agents[2].store
    assert store is not None
    asked = store.stats().work["exists"].count if "exists" in store.stats().work else 0
    read(fragments, [1])
    wait_until("parity is asked for", lambda: store.stats().work["exists"].count > asked)


def test_parity_that_its_holder_has_displaced_is_missed_when_the_column_is_read(small: World) -> None:
    fragments = small.fragments()
    contents = [content(), content()]
    assert fragments.write([outgoing(number, one) for number, one in enumerate(contents)]) == [True] * 2
    fragments.holders.delete([address(1)], [2])
    assert read(fragments, [0, 1]) == contents
    wait_until("it is known", lambda: fragments.incomplete_at() == [0, 0, 1])
    assert fragments.repair([address(1).name]) > 0
    assert (fragments.incomplete, len(small.agents[2].names)) == (0, 2)


def test_while_an_agent_is_away_columns_are_stored_and_repaired_later(
    fragments: Fragments, world: World
) -> None:
    world.agents[-1].stop()
    one = content()
    assert fragments.write([outgoing(1, one)]) == [True]
    assert (fragments.incomplete, fragments.some_incomplete(9)) == (1, [])  # not while it is away
    assert fragments.repair([address(1).name]) > 0
    assert fragments.incomplete == 1  # it is still away
    world.agents[-1].start()
    later = world.fragments()
    assert [found.address for found in later.files()] == [address(1)]
    assert later.incomplete == 1
    assert later.repair([address(1).name]) > 0
    assert later.incomplete == 0
    assert len(world.agents[-1].names) == 1
    later.close()


def test_too_few_agents_store_nothing_and_leave_nothing(fragments: Fragments, world: World) -> None:
    for agent in world.agents[world.data - 1 :]:
        agent.stop()
    (answer,) = fragments.write([outgoing(1, content())])
    assert isinstance(answer, Failed)
    assert not any(agent.names for agent in world.agents[: world.data - 1])


def test_what_changes_while_it_is_read_is_not_stored(fragments: Fragments, world: World) -> None:
    files = [outgoing(1, content(), intact=False), outgoing(2, content())]
    assert fragments.write(files) == [False, True]
    assert read(fragments, [1])[0] is None
    assert all(len(agent.names) == 1 for agent in world.agents)


def test_full_disks_say_that_there_is_no_room(small: World) -> None:
    for agent in small.agents[:2]:
        agent.stop()
        agent.cap = 4096
        agent.start()
    fragments = small.fragments()
    (answer,) = fragments.write([outgoing(1, content())])
    assert isinstance(answer, Failed)
    assert answer.fault is Fault.NO_SPACE
    assert not small.agents[2].names


def test_a_delete_reaches_all_agents_or_fails(fragments: Fragments, world: World) -> None:
    assert fragments.write([outgoing(1, content()), outgoing(2, content())]) == [True] * 2
    fragments.delete([address(1).name])
    assert read(fragments, [1])[0] is None
    assert all(len(agent.names) == 1 for agent in world.agents)
    world.agents[0].stop()
    with pytest.raises(Failed):
        fragments.delete([address(2).name])


def test_a_purge_leaves_nothing_of_a_tag_anywhere(fragments: Fragments, world: World) -> None:
    other = b"o" * 16
    assert fragments.write([outgoing(1, content()), outgoing(1, content(), other)]) == [True] * 2
    assert fragments.purge(Scope(TAG)).columns == 1
    assert all(len(agent.names) == 1 for agent in world.agents)
    assert fragments.purge(Scope(namespace=b"m" * 16)).columns == 0
    assert fragments.purge(Scope(namespace=NAMESPACE)).columns == 1
    assert not any(agent.names for agent in world.agents)
    world.agents[0].stop()
    with pytest.raises(Failed):
        fragments.purge(Scope(TAG))


def test_more_files_than_slots_have_their_turn(fragments: Fragments) -> None:
    count = SLOTS + AT_ONCE + 1
    contents = [content(4096) for _ in range(count)]
    assert fragments.write([outgoing(n, one) for n, one in enumerate(contents)]) == [True] * count
    assert read(fragments, range(count)) == contents
    assert sorted(found.address.key for found in fragments.files()) == [
        address(number).key for number in range(count)
    ]
    assert fragments.incomplete == 0


def test_who_is_superseded_at_holders_takes_no_place_there_again(small: World) -> None:
    """The former home of a shard may not have heard yet that it is one."""
    former, home = small.fragments(), small.fragments()
    former.open()
    assert former.write([outgoing(1, content())]) == [True]
    home.open()
    wait_until("its places are taken", lambda: not any(one.incarnation for one in former.holders))
    former.reach_holders()
    assert former.is_superseded
    assert all(one.incarnation for one in home.holders)
    (found,) = read(former, [1])
    assert isinstance(found, Failed)
    assert "the driver has connected anew" in str(found)
    assert home.write([outgoing(2, content())]) == [True]
    assert not home.is_superseded


def test_a_home_that_its_former_one_has_superseded_stores_again(
    small: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The node of the former home was started anew, and the console has not reached its agent yet. No
    other document comes for the home."""
    monkeypatch.setattr("kvss_agent.redundancy.holder.SUPERSEDED_SECONDS", 0.0)
    home, former = small.fragments(), small.fragments()
    home.open()
    former.open()
    wait_until("its places are taken", lambda: not any(one.incarnation for one in home.holders))
    for _ in range(2):
        home.reach_holders()
        assert home.is_superseded
    assert all(one.incarnation for one in former.holders), "who is idle takes no place"
    assert home.write([outgoing(1, content())]) == [True]
    assert not home.is_superseded


def test_with_too_few_agents_it_does_not_open(world: World) -> None:
    for agent in world.agents[: world.parity + 1]:
        agent.stop()
    with pytest.raises(Failed):
        world.fragments().open()
