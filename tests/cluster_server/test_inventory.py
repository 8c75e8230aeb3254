"""The boxes, and who has them."""

from __future__ import annotations

from cluster_server.inventory import Inventory


class Name(str):
    """Counts how often it is compared with another one."""

    __slots__ = ()
    compared = 0

    def __eq__(self, other: object) -> bool:
        Name.compared += 1
        return str.__eq__(self, other)

    __hash__ = str.__hash__


async def test_a_lock_looks_at_no_other_boxes() -> None:
    """Of a large inventory that would keep everybody waiting."""

    async def store(_: dict[str, str]) -> None:
        pass

    names = [f"box-{number:04}" for number in range(2000)]
    inventory = Inventory(map(Name, names), {}, store)
    Name.compared = 0
    boxes = await inventory.lock("chat", names[-500:])
    assert [one.name for one in boxes if one.holder] == names[-500:]
    assert Name.compared <= 2 * 500, "to see that there are such boxes, and to answer"
