"""How brains divide the places of a model among them, each for itself, from what all have reported.

Pure. Places go to orgs first, by weight and by what they ask for, and then to the brains at which they
ask. So a brain that has only requests of a greedy org has no more places than that org is due.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

_EPSILON: Final = 1e-6


class Asking(NamedTuple):
    """Of one org at one brain: requests with a place, requests that wait."""

    placed: int
    queued: int
    weight: int

    @property
    def wanted(self) -> int:
        return self.placed + self.queued


Demand = Mapping[str, Asking]  # by org, of one model at one brain


def fair_shares(total: float, wanted: Mapping[str, tuple[float, int]]) -> dict[str, float]:
    """Divide by weight; nobody gets more than it wants. `wanted`: amount and weight by org."""
    shares: dict[str, float] = {}
    left = total
    weights = sum(weight for _, weight in wanted.values())
    for org, (amount, weight) in sorted(wanted.items(), key=lambda one: one[1][0] / one[1][1]):
        shares[org] = min(amount, left * weight / weights)
        left -= shares[org]
        weights -= weight
    return shares


def quotas(places: int, demands: Sequence[Demand]) -> list[int]:
    """The places of each brain. Together they are all places, or all that is wanted."""
    wanted: dict[str, tuple[float, int]] = {}
    for demand in demands:
        for org, asking in demand.items():
            before = wanted.get(org, (0, 0))
            wanted[org] = (before[0] + asking.wanted, max(before[1], asking.weight))
    wanted = {org: one for org, one in wanted.items() if one[0]}
    shares = fair_shares(places, wanted)
    exact = [
        sum(
            shares[org] * asking.wanted / wanted[org][0]
            for org, asking in demand.items()
            if org in shares
        )
        for demand in demands
    ]
    whole = [int(one + _EPSILON) for one in exact]
    over = round(sum(exact)) - sum(whole)
    by_rest = sorted(range(len(exact)), key=lambda at: whole[at] - exact[at])
    for at in by_rest[:over]:
        whole[at] += 1
    return whole


@dataclass(slots=True)
class Division:
    """What one brain makes of it. `part`: of all there is, what its orgs are due, wanted or not."""

    places: int
    part: float = 1.0
    wanted_elsewhere: int = 0
    queued_elsewhere: int = 0
    placed_elsewhere: dict[str, int] = field(default_factory=dict)
    prefilling_elsewhere: int = 0
    weights: int = 0  # of all orgs that want something


def divide(places: int, demands: Mapping[str, Demand], mine: str) -> Division:
    """`demands` by brain. All brains divide alike, as the order is that of their names."""
    names = sorted(demands)
    each = quotas(places, [demands[name] for name in names])
    own = each[names.index(mine)]
    division = Division(own)
    weights: dict[str, int] = {}
    wanted: dict[str, int] = {}
    for name, demand in demands.items():
        for org, asking in demand.items():
            weights[org] = max(asking.weight, weights.get(org, 0))
            wanted[org] = wanted.get(org, 0) + asking.wanted
            if name != mine:
                division.wanted_elsewhere += asking.wanted
                division.queued_elsewhere += asking.queued
                before = division.placed_elsewhere.get(org, 0)
                division.placed_elsewhere[org] = before + asking.placed
    division.weights = sum(weights.values())
    due = sum(
        weights[org] * asking.wanted / wanted[org]
        for org, asking in demands[mine].items()
        if wanted[org]
    )
    division.part = due / division.weights if division.weights else 1 / len(names)
    return division
