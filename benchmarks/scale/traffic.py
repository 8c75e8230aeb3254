"""Conversations that go on: when each request comes, whose it is, and how long its prompt is.

Lengths, pauses and turns are drawn from quantiles of the public trace `conversation.jsonl` (FAST '25,
Mooncake; 12,031 requests of an hour), which `tests/test_benchmark_scale.py` compares with the file. Its
conversations are told apart by their second block. A conversation goes on at its model for as long as
the trace's do; the beginning of its prompt is one of its org's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from benchmarks.scale.sizes import MODELS, ORG_SKEW, ORGS, WARM, Model
from swdriver_shim.cache_map.codec import CHUNK
from swdriver_shim.keys import COLUMN_TOKENS, KEY_BYTES, Keys, Namespace

Floats = npt.NDArray[np.float64]

AT: Final = (0, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99, 1)
FIRST: Final = (
    *(890, 897, 905, 1_092, 1_756, 3_914, 5_264),
    *(7_417, 10_775, 15_871, 25_561, 38_538, 89_869, 125_000),
)  # tokens of a conversation's first prompt
MORE: Final = (
    *(64, 64, 64, 117, 267, 369, 455),
    *(547, 701, 1_540, 4_633, 7_461, 17_472, 60_000),
)  # by which a prompt is longer than the one before; a prompt that was cut short grows by a column
ANSWERS: Final = (1, 10, 24, 100, 213, 291, 350, 399, 447, 504, 597, 698, 1_120, 2_000)  # tokens
PAUSES: Final = (3, 30, 42, 60, 75, 96, 123, 162, 222, 318, 480, 615, 1_482, 3_000)  # seconds
GOES_ON: Final = (0.31, 0.42, 0.51, 0.59)  # after the first request, the second, …; then as the last
TURNS_MAX: Final = 16
PROMPT_MAX: Final = 128_000
HISTORY: Final = 1_500.0  # seconds before the first request in which conversations may have begun
HEADS: Final = 4  # beginnings of each org's prompts, of 1 to 4 chunks


def turns_mean() -> float:
    """Requests of a conversation, on average."""
    alive, total = 1.0, 0.0
    for turn in range(TURNS_MAX):
        total += alive
        alive *= goes_on(turn)
    return total


def goes_on(turn: int) -> float:
    return GOES_ON[min(turn, len(GOES_ON) - 1)]


@dataclass(frozen=True, slots=True, eq=False)
class Ask:
    """A request: of this conversation of an org, for one model."""

    number: int
    at: float
    model: int
    org: int
    conversation: int
    head: int
    tokens: int
    answer: int


def asks(stamps: int, seconds: float, seed: int, share: float = 1.0) -> list[Ask]:
    """All requests, in the order of time: before `WARM` those that caches are filled with, and then so
    many seconds of them. `share`: of the requests that there would be."""
    found: list[Ask] = []
    for place, model in enumerate(MODELS):
        rng = np.random.default_rng((seed, place))
        rate = share * model.replicas * stamps * model.rate
        found += _of_model(place, model, rate, seconds, rng)
    found.sort(key=lambda one: (one.at, one.model, one.conversation))
    return [_numbered(one, number) for number, one in enumerate(found)]


def _numbered(one: Ask, number: int) -> Ask:
    return Ask(number, one.at, one.model, one.org, one.conversation, one.head, one.tokens, one.answer)


def _of_model(
    place: int, model: Model, rate: float, seconds: float, rng: np.random.Generator
) -> list[Ask]:
    begins, ends = WARM - model.warm, WARM + seconds
    count = int(rng.poisson(rate / turns_mean() * (ends - begins + HISTORY)))
    at = rng.uniform(begins - HISTORY, ends, count)
    weights = 1 / np.arange(1, ORGS + 1) ** ORG_SKEW
    orgs = rng.choice(ORGS, count, p=weights / weights.sum())
    heads = rng.integers(0, HEADS, count)
    tokens = drawn(FIRST, count, rng)
    alive = np.arange(count)
    found: list[Ask] = []
    for turn in range(TURNS_MAX):
        answers = drawn(ANSWERS, alive.size, rng)
        for number, answer in zip(alive.tolist(), answers.tolist(), strict=True):
            if begins <= at[number] < ends:
                found.append(
                    Ask(
                        -1,
                        float(at[number]),
                        place,
                        int(orgs[number]),
                        number * len(MODELS) + place,
                        int(heads[number]),
                        int(min(PROMPT_MAX, tokens[number])),
                        max(1, int(answer)),
                    )
                )
        alive = alive[rng.random(alive.size) < goes_on(turn)]
        at[alive] += drawn(PAUSES, alive.size, rng)
        tokens[alive] += drawn(MORE, alive.size, rng)
    return found


def drawn(quantiles: tuple[int, ...], count: int, rng: np.random.Generator) -> Floats:
    """So many values of a distribution with these quantiles; between two of them by their logarithms."""
    logs = np.log(np.array(quantiles, np.float64))
    values: Floats = np.exp(np.interp(rng.random(count), AT, logs))
    return values


# Keys


def makers(namespace: Namespace, orgs: int = ORGS) -> list[Keys]:
    return [Keys(org_name(org), secret_of(org), namespace) for org in range(orgs)]


def org_name(org: int) -> str:
    return f"org-{org:04}"


def secret_of(org: int) -> bytes:
    return org.to_bytes(4, "little") * 8


def columns(one: Ask) -> list[bytes]:
    """The keys of a prompt's whole columns: first its org's beginning, then its own."""
    return _keys(one, np.arange(one.tokens // COLUMN_TOKENS, dtype=np.uint64))


def chunk_ends(one: Ask) -> list[bytes]:
    """Of these the last of each whole chunk."""
    return _keys(one, np.arange(CHUNK - 1, one.tokens // COLUMN_TOKENS, CHUNK, dtype=np.uint64))


def _keys(one: Ask, places: npt.NDArray[np.uint64]) -> list[bytes]:
    shared = (1 + one.head) * CHUNK
    head = (1 << 40) + (one.org * HEADS + one.head) * len(MODELS) + one.model
    whose = np.where(places < shared, np.uint64(head << 16), np.uint64(one.conversation << 16))
    mixed = whose + places
    for factor, shift in _MIX:  # the end of SplitMix64: numbers that are near are far from each other
        mixed = (mixed ^ (mixed >> shift)) * factor
    mixed ^= mixed >> _LAST
    raw = np.repeat(mixed, 2).tobytes()
    return [raw[at : at + KEY_BYTES] for at in range(0, len(raw), KEY_BYTES)]


_MIX: Final = (
    (np.uint64(0xBF58476D1CE4E5B9), np.uint64(30)),
    (np.uint64(0x94D049BB133111EB), np.uint64(27)),
)
_LAST: Final = np.uint64(31)
