"""Who waits gets a place, is refused in time, or leaves nothing behind."""

from __future__ import annotations

import asyncio

import pytest

from inference_brain.admission import Admission, Place, Reason, Rejected
from tests.inference_brain.admission.tickets import Rooms, ticket


async def entering(admission: Admission, **more: object) -> asyncio.Task[Place]:
    """A request that has got as far as it does."""
    task = asyncio.create_task(admission.enter(ticket(**more)))  # type: ignore[arg-type]
    await asyncio.sleep(0)
    return task


async def test_a_free_place_is_given_at_once() -> None:
    admission = Admission(Rooms(1))
    place = await admission.enter(ticket())
    assert place.waited_seconds < 1


async def test_who_waits_gets_the_place_of_who_leaves() -> None:
    admission = Admission(Rooms(1))
    place = await admission.enter(ticket())
    second = await entering(admission)
    assert not second.done()
    place.leave(answer_tokens=5)
    (await second).leave()


async def test_a_place_is_given_back_at_the_end_of_a_with() -> None:
    admission = Admission(Rooms(1))
    with pytest.raises(ZeroDivisionError), await admission.enter(ticket()):
        raise ZeroDivisionError
    await admission.enter(ticket())


async def test_a_place_is_given_back_once() -> None:
    admission = Admission(Rooms(1))
    place = await admission.enter(ticket())
    place.leave()
    other = await admission.enter(ticket())
    place.leave()
    third = await entering(admission)
    assert not third.done()
    other.leave()
    await third


async def test_a_request_that_is_cancelled_while_it_waits_is_forgotten() -> None:
    admission = Admission(Rooms(1))
    place = await admission.enter(ticket())
    second, third = await entering(admission), await entering(admission)
    second.cancel()
    place.leave()
    await third
    assert second.cancelled()


async def test_a_place_given_to_a_request_that_is_cancelled_just_then_goes_to_the_next() -> None:
    admission = Admission(Rooms(1))
    place = await admission.enter(ticket())
    second, third = await entering(admission), await entering(admission)
    place.leave()  # `second` has the place now, but has not run
    second.cancel()
    with pytest.raises(asyncio.CancelledError):
        await second
    await third


async def test_nobody_waits_longer_than_its_org_allows() -> None:
    admission = Admission(Rooms(1))
    await admission.enter(ticket())
    with pytest.raises(Rejected) as refused:
        await admission.enter(ticket(wait_seconds=0.01))
    assert (refused.value.status, refused.value.code) == (503, Reason.DEADLINE)
    assert int(refused.value.header or 0) >= 1


async def test_without_a_replica_requests_wait_and_are_told_why() -> None:
    rooms = Rooms(0)
    admission = Admission(rooms)
    with pytest.raises(Rejected) as refused:
        await admission.enter(ticket(wait_seconds=0.01))
    assert refused.value.code == Reason.NO_REPLICA
    second = await entering(admission)
    rooms.one = Rooms(1).one
    admission.changed()
    await second


async def test_an_org_has_a_bounded_queue() -> None:
    admission = Admission(Rooms(1))
    await admission.enter(ticket())
    waiting = [await entering(admission, queued=2) for _ in range(2)]
    with pytest.raises(Rejected) as refused:
        await admission.enter(ticket(queued=2))
    assert (refused.value.status, refused.value.code) == (429, Reason.QUEUE)
    other = await entering(admission, org="other", queued=2)
    for one in (*waiting, other):
        one.cancel()


async def test_the_first_token_makes_room_for_another_prompt() -> None:
    admission = Admission(Rooms(10, prefill_tokens=100))
    place = await admission.enter(ticket(prompt=150))
    second = await entering(admission)
    assert not second.done()
    place.first_token()
    await second
