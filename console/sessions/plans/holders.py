"""Which agents store the fragments of a shard. Pure.

No two fragments of a shard are at one agent, nor in one place that several agents share: they would be
lost together. As few as possible are on one leaf. An agent that has a fragment keeps it for as long as
it can, since a fragment that moves has to be computed again from the others.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from console.fleet.descriptions.tier2 import may_share_files
from console.placement.rules import Redundancy


class Standing(Enum):
    """What an agent does about fragments."""

    FREE = "free"  # it takes more
    KEEPS = "keeps"  # it keeps those that it has
    LEAVES = "leaves"  # other agents take its fragments over


@dataclass(frozen=True, slots=True)
class Agent:
    """`tier2`: as the fleet's description says it; empty where it stores no fragments. `why`: it takes
    none, as the end of a sentence about it."""

    name: str
    standing: Standing
    leaves: frozenset[str]  # on which it has a NIC
    tier2: Mapping[str, Any]
    address: str
    why: str = ""


@dataclass(frozen=True, slots=True)
class Choice:
    """`holders`: names of agents in the order of the fragments; none where there are too few. `why`: of
    that; or why an agent still has a fragment that it should not have."""

    holders: tuple[str, ...]
    why: str = ""


def choose(
    code: Redundancy, current: Mapping[int, str], agents: Collection[Agent], fragments: Mapping[str, int]
) -> Choice:
    """Who stores which fragment of a shard. `current`: who does so now, by the number of the fragment.
    `fragments`: how many each agent has, of all shards.

    An agent that leaves keeps its fragment while no other can take it over: what it has may still help.
    """
    known = {agent.name: agent for agent in agents}
    chosen: dict[int, Agent] = {}
    for place in range(code.holders):
        held = known.get(current.get(place, ""))
        if held and held.standing is not Standing.LEAVES and _is_apart(held, chosen.values()):
            chosen[place] = held
    for place in range(code.holders):
        if place not in chosen and (best := _best(agents, chosen.values(), fragments)):
            chosen[place] = best
    why = ""
    for place in range(code.holders):
        if place in chosen:
            continue
        held = known.get(current.get(place, ""))
        if held is None or held.address in {one.address for one in chosen.values()}:
            return Choice((), too_few(code, agents))
        chosen[place] = held
        reason = held.why or "shares its tier 2 with another one"
        why = why or f"{held.name} {reason}, and no other agent can take its fragments over. "
    if why:
        why += too_few(code, agents)
    return Choice(tuple(chosen[place].name for place in range(code.holders)), why)


def too_few(code: Redundancy, agents: Iterable[Agent]) -> str:
    """How many agents a code needs, how many there are, and how many more there would be if none shared
    a place with another."""
    there = [agent for agent in agents if agent.standing is not Standing.LEAVES]
    count = len(apart(there))
    said = "there is 1" if count == 1 else f"there are {count or 'none'}"
    more = len(there) - count
    shared = f" {more} more may share theirs: `shared: false` says that they do not." if more else ""
    return (
        f"{code.value} needs {code.holders} agents with tier 2 on a disk of their own; {said}.{shared}"
    )


def without_count(sentence: str) -> str:
    """As those may read it who are not to know how many agents there are."""
    return re.sub(r"; there (is|are) .*?(?= Columns have|$)", ", and there are fewer.", sentence)


def apart(agents: Iterable[Agent]) -> list[Agent]:
    """As many as can have fragments of one shard."""
    found: list[Agent] = []
    for agent in sorted(agents, key=lambda one: one.name):
        if agent.standing is not Standing.LEAVES and _is_apart(agent, found):
            found.append(agent)
    return found


def _best(
    agents: Iterable[Agent], chosen: Collection[Agent], fragments: Mapping[str, int]
) -> Agent | None:
    """Of those that may take one more the one that shares no leaf, then that with fewest fragments."""
    taken = Counter(leaf for agent in chosen for leaf in agent.leaves)

    def order(agent: Agent) -> tuple[int, int, str]:
        # One with NICs on two leaves is not lost with either.
        shared = min((taken[leaf] for leaf in agent.leaves), default=0)
        return shared, fragments.get(agent.name, 0), agent.name

    free = sorted((one for one in agents if one.standing is Standing.FREE), key=order)
    return next((one for one in free if _is_apart(one, chosen)), None)


def _is_apart(agent: Agent, others: Iterable[Agent]) -> bool:
    """Whether it is another agent than each of them, and stores in another place."""
    return not any(
        agent.address == other.address
        or agent.name == other.name
        or may_share_files(agent.tier2, other.tier2)
        for other in others
    )
