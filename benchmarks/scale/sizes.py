"""What the fleet is made of, how fast its links are, and what is asked of it. All of it is assumed, and
stated here once.

A stamp has 20 boxes, 80 nodes and 4 leaves. On 17 of its boxes run 8 replicas of three models, the
others are room for rollouts and losses; 125 stamps are the whole fleet: 10,000 nodes, 2,500 boxes and
1,000 replicas, which get 100,000 requests a second.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from benchmarks.routing.timing import Timing

NODES: Final = 80  # of a stamp
BOXES: Final = 20
LEAVES: Final = 4
FULL: Final = 125  # stamps
NODE_BYTES: Final = 1 << 40
SHARDS_MAX: Final = 6
GRANT_PERCENT: Final = 75  # of the fair share, so that streams find rails

GBIT: Final = 125_000_000  # bytes a second
NIC_GBITS: Final = 400  # each of the two of a node, in either direction
WIO_GBITS: Final = 50  # of a domain's port, for each WIO: 400 for a domain of 8
SPINE_GBITS: Final = 1_600  # of a leaf: four links; its 40 NICs and 20 ports have 24,000

ORGS: Final = 1_000
ORG_SKEW: Final = 1.0  # Zipf's exponent
CHUNK_TOKENS: Final = 512  # eight columns


@dataclass(frozen=True, slots=True)
class Model:
    """`kibibytes`: of a token, by cache group. `rate`: requests a second at one replica. `prefill`:
    tokens a second that a replica computes; `doubles`: the depth at which attention to what precedes a
    token takes as long as all else. `warm`: seconds of traffic in which its cache is filled before
    anything is measured."""

    name: str
    boxes: int
    replicas: int  # of a stamp
    kibibytes: tuple[int, ...]
    rate: float
    prefill: float
    doubles: float
    warm: float

    @property
    def token_bytes(self) -> int:
        return sum(self.kibibytes) << 10

    @property
    def timing(self) -> Timing:
        """Steps of a millisecond, and chunks of what is computed in some five more."""
        return Timing(
            step=0.001,
            token=1 / self.prefill,
            pair=1 / self.prefill / self.doubles,
            running=2e-6,  # of each answer in a step: half a million tokens a second at most
            context=0.0,
            request=0.001,
            cached_token=0.0,
            step_tokens=max(2048, int(self.prefill * 0.005)),
            running_max=512,
        )


# Of 8, 70 and 405 billion parameters, keys and values in 8 bits. Prefill: 2 operations for each
# parameter and token, at 1.5e17 a second for a box. Rates: what keeps a replica busy half of the
# time.
MODELS: Final = (
    Model("small", 1, 3, (40, 24), 200.0, 9.4e6, 32_000, 45.0),
    Model("medium", 2, 3, (96, 64), 56.0, 2.1e6, 54_000, 120.0),
    Model("large", 4, 2, (160, 96), 16.0, 7.4e5, 98_000, 300.0),
)
WARM: Final = max(model.warm for model in MODELS)  # virtual time when what is measured begins


def replicas(stamps: int) -> int:
    return stamps * sum(model.replicas for model in MODELS)


def rate(stamps: int) -> float:
    """Requests a second of the whole fleet."""
    return stamps * sum(model.replicas * model.rate for model in MODELS)
