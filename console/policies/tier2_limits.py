"""What an org's policies come to at an agent, which has one figure for an org, whatever the model. Pure.

So there is room for what each policy of the org allows, and files lie for as long as the longest of them
says: what is served is looked at by drivers.
"""

from __future__ import annotations

from dataclasses import dataclass

from swdriver_shim.policy import OrgPolicies, Policy, Tiers


@dataclass(frozen=True, slots=True)
class Tier2Limits:
    """Of one org, at each agent; None is no limit."""

    bytes_max: int | None
    seconds_max: int | None


def tier2_limits_of(policies: OrgPolicies) -> Tier2Limits:
    each = [policies.policy, *policies.models.values()]
    there = [policy for policy in each if policy.tiers is Tiers.TIER2]
    caps = [policy.tier2_bytes_max for policy in there]
    seconds = [_seconds(policy) for policy in there or each]  # of files of before it was taken out
    return Tier2Limits(
        bytes_max=None if None in caps else sum(cap for cap in caps if cap is not None),
        seconds_max=None if None in seconds else max(one for one in seconds if one is not None),
    )


def _seconds(policy: Policy) -> int | None:
    """Since it was copied there: the shorter of two times to live."""
    limits = (policy.ttl_first_use_seconds, policy.ttl_last_use_seconds)
    return min((one for one in limits if one is not None), default=None)
