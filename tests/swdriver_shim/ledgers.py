"""Ledgers, conversations and short ways to use them."""

from __future__ import annotations

from collections.abc import Sequence

from swdriver_shim.cache.ledger import Ledger
from swdriver_shim.cache.reasons import Reason, Removal
from swdriver_shim.keys import COLUMN_TOKENS, Prompt
from swdriver_shim.layout import Layout
from swdriver_shim.policy import AS_USUAL, OrgPolicies, Policy, Rules
from tests.swdriver_shim.integrity import check_integrity
from tests.swdriver_shim.prompts import FULL

C = COLUMN_TOKENS


def ledger(slots: int = 8, layout: Layout = FULL, **policies: Policy) -> Ledger:
    made = Ledger(layout, "llama")
    for group in range(len(layout.groups)):
        made.set_slot_limit(group, slots)
    made.set_policies({org: OrgPolicies(policy=policy) for org, policy in policies.items()}, 0)
    return made


def store(made: Ledger, asked: Prompt, now: float = 0, rules: Rules = AS_USUAL) -> list[int]:
    begun = made.begin_store(asked, asked.tokens, now, rules)
    made.finish_store(begun, now)
    return [place.slot for place in begun.places]


def missed(made: Ledger, asked: Prompt, now: float = 0) -> dict[Reason, int]:
    """What a match of this prompt counts as missed."""
    tally = made._stock.account(asked.org).tally
    before = tally.missed.copy()
    made.release(made.match(asked, now))
    check_integrity(made)
    return dict(tally.missed - before)


def is_done(receipt: Removal) -> bool:
    return receipt.done


def finish(made: Ledger) -> None:
    while made.reclaim():
        pass
    carry_out(made)


def carry_out(made: Ledger) -> None:
    """Agents have emptied and deleted whatever the ledger has removed so far."""
    while clears := made.take_clears(64):
        made.finish_clears(clears, is_done=True)
    while forgets := made.tier2.take_deletes(64):
        made.tier2.finish_deletes(forgets, is_done=True)
    while purge := made.tier2.take_purge():
        made.tier2.finish_purge(purge, is_done=True)


def conversation(*kinds: int, rest: int = 0) -> Sequence[int]:
    return [kind for kind in kinds for _ in range(C)] + [99] * rest
