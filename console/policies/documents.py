"""Policies as text, and what no policy may cross. Pure: no database, no clock.

`swdriver_shim.policy` is what a policy is. Here it is written down with every field spelled out, since
what a version left unsaid would change its meaning with the next default.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, NamedTuple, TypeVar

import msgspec
from msgspec import Struct, structs

from swdriver_shim.policy import Bytes, OrgPolicies, Policy, Priority, Seconds, Share, Tiers
from telemetry.decoder import decode
from telemetry.units import exact_duration, exact_size

T = TypeVar("T")

MODELS_MAX: Final = 50
_DECODER: Final = msgspec.json.Decoder(OrgPolicies | None)
FIELDS: Final = tuple(Policy.__struct_fields__)
_TIERS: Final = tuple(Tiers)  # each may do what those before it may


class Malformed(ValueError):
    """What is no policy, in a sentence. `at` is where: `policy/ttl_last_use_seconds`, or nothing."""

    def __init__(self, at: str, sentence: str) -> None:
        super().__init__(sentence)
        self.at = at


class Limits(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What no org's policy may cross. None: no limit but that of the software."""

    ttl_first_use_seconds_max: Seconds | None = None
    ttl_last_use_seconds_max: Seconds | None = None
    tiers_max: Tiers = Tiers.TIER2
    dram_bytes_max: Bytes | None = None
    tier2_bytes_max: Bytes | None = None
    share_max: Share = 1_000_000
    priority_max: Priority = 100

    def crossed_by(self, policy: Policy) -> Iterator[tuple[str, str]]:
        """The fields that cross a limit, each with a sentence that says what is allowed."""
        for field, limit in _LIMITS.items():
            most = getattr(self, limit.name)
            if limit.held(getattr(policy, field), most) != getattr(policy, field):
                yield field, f"{limit.sentence.format(limit.show(most))}: the platform's limit."

    def held(self, policy: Policy) -> Policy:
        """The policy as far as it is allowed. One that was saved under wider limits is held to these."""
        return structs.replace(
            policy,
            **{
                field: limit.held(getattr(policy, field), getattr(self, limit.name))
                for field, limit in _LIMITS.items()
            },
        )

    def held_all(self, policies: OrgPolicies) -> OrgPolicies:
        models = {model: self.held(policy) for model, policy in policies.models.items()}
        return OrgPolicies(policy=self.held(policies.policy), models=models)


class ClusterPolicies(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """For orgs that say nothing, and for those that say too much."""

    default: Policy = Policy()
    limits: Limits = Limits()


class _Limit(NamedTuple):
    name: str  # in Limits
    held: Callable[[Any, Any], Any]
    sentence: str
    show: Callable[[Any], str] = "{:,}".format


def _at_most(value: int | None, most: int | None) -> int | None:
    """None is more than any number."""
    if most is None:
        return value
    return most if value is None else min(value, most)


def _no_further(value: Tiers, most: Tiers) -> Tiers:
    return min(value, most, key=_TIERS.index)


_LIMITS: Final[Mapping[str, _Limit]] = {
    "ttl_first_use_seconds": _Limit(
        "ttl_first_use_seconds_max", _at_most, "At most {} from the first use", exact_duration
    ),
    "ttl_last_use_seconds": _Limit(
        "ttl_last_use_seconds_max", _at_most, "At most {} from the last use", exact_duration
    ),
    "tiers": _Limit("tiers_max", _no_further, "Storage tiers, at most {}", str),
    "dram_bytes_max": _Limit("dram_bytes_max", _at_most, "At most {} of memory", exact_size),
    "tier2_bytes_max": _Limit("tier2_bytes_max", _at_most, "At most {} of tier 2", exact_size),
    "share": _Limit("share_max", _at_most, "At most {}"),
    "priority": _Limit("priority_max", _at_most, "At most {}"),
}


def write(policies: OrgPolicies | ClusterPolicies | None) -> str:
    """The same policies are the same text, byte for byte. None is an org that follows the default."""
    return json.dumps(spelled_out(policies), sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def spelled_out(value: Any) -> Any:
    """With every field, also where it has its default."""
    if isinstance(value, Struct):
        return {name: spelled_out(getattr(value, name)) for name in value.__struct_fields__}
    if isinstance(value, dict):
        return {str(key): spelled_out(each) for key, each in value.items()}
    return str(value) if isinstance(value, Tiers) else value


def read_org(text: str) -> OrgPolicies | None:
    """What `write` wrote, of an org."""
    found: OrgPolicies | None = decode(text, _DECODER)
    return found


def read_cluster(text: str) -> ClusterPolicies:
    return decode(text, ClusterPolicies)


def read_struct(raw: Any, kind: type[T]) -> T:
    """Of plain values, from outside. Raises Malformed."""
    try:
        return msgspec.convert(raw, kind)
    except msgspec.ValidationError as error:
        sentence, _, path = str(error).partition(" - at `$")
        at = path.rstrip("`").strip(".").replace(".", "/").replace("[...]", "")
        raise Malformed(at, f"{sentence}.") from None


def problems(policies: OrgPolicies, limits: Limits) -> Iterator[Malformed]:
    """All that the limits refuse, policy by policy."""
    named = [("policy", policies.policy)]
    named += [(f"models/{model}", policy) for model, policy in policies.models.items()]
    for where, policy in named:
        for field, sentence in limits.crossed_by(policy):
            yield Malformed(f"{where}/{field}", sentence)


def changed_fields(before: Policy, after: Policy) -> tuple[str, ...]:
    """Whose value is another one, in the order of the definition."""
    return tuple(name for name in FIELDS if getattr(before, name) != getattr(after, name))
