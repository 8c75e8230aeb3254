"""Column files as fragments on several agents: losing as many as there is parity loses nothing."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from kvss_agent.redundancy.fragments import AT_ONCE, Fragments
from kvss_agent.redundancy.layout import SLOTS
from kvss_agent.tier2.address import Address, Scope
from kvss_agent.tier2.backend import Failed, Fault, Outgoing
from tests.kvss_agent.redundancy.holders import NAMESPACE, PART, SLOT, World, running

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
        assert len(fragments.unreachable()) <= world.parity
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
        fragments.look(address(1).name)


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
    """An agent that was away has the one before."""
    fragments = small.fragments()
    fragments.open()
    first, second = content(), content()
    assert fragments.write([outgoing(1, first)]) == [True]
    small.agents[0].stop()
    assert fragments.write([outgoing(1, second)]) == [True]
    assert fragments.incomplete == 1
    small.agents[0].start()
    later = small.fragments()
    assert read(later, [1]) == [second]
    assert later.repair([address(1).name]) > 0
    small.agents[1].stop()
    assert read(small.fragments(), [1]) == [second]


def test_while_an_agent_is_away_columns_are_stored_and_repaired_later(
    fragments: Fragments, world: World
) -> None:
    world.agents[-1].stop()
    one = content()
    assert fragments.write([outgoing(1, one)]) == [True]
    assert (fragments.incomplete, fragments.some_incomplete(9)) == (1, [address(1)])
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


def test_with_too_few_agents_it_does_not_open(world: World) -> None:
    for agent in world.agents[: world.parity + 1]:
        agent.stop()
    with pytest.raises(Failed):
        world.fragments().open()
