"""What became of a request: column by column, as it was counted, for a while and without tokens."""

from __future__ import annotations

import time
from collections import Counter

from swdriver_shim.cache.ledger import Ledger
from swdriver_shim.cache.lookup import Match
from swdriver_shim.cache.reasons import Reason
from swdriver_shim.cache.request_log import Conversations, PromptKeys, RequestLog, RequestRecord
from swdriver_shim.keys import COLUMN_TOKENS, Keys, Prompt
from swdriver_shim.policy import Policy
from tests.swdriver_shim.ledgers import ledger, store
from tests.swdriver_shim.prompts import NAMESPACE, SECRET

C = COLUMN_TOKENS


def asked(columns: int, request: str = "r-1", rest: int = 0, org: str = "acme") -> Prompt:
    return Keys(org, SECRET, NAMESPACE).prompt(range(columns * C + rest), request)


def loaded(made: Ledger, prompt: Prompt, now: float = 0.0) -> Match:
    match = made.match(prompt, now)
    made.release(match)
    made.log_request(match, now)
    return match


def known(made: Ledger, request: str = "r-1", org: str = "acme") -> RequestRecord:
    found = made._stock.requests.find(org, request)
    assert found is not None
    assert sum(found.missed.values()) + found.hit == found.asked, "each token once"
    assert sum(count for _, count in found.runs()) == found.asked // C, "each column once"
    return found


def test_what_was_hit_and_why_the_rest_was_not_is_known_column_by_column() -> None:
    made = ledger(8)
    store(made, asked(3))
    store(made, asked(5))
    made._stock.remove(known_column(made, asked(5), 4), Reason.DISPLACED)
    loaded(made, asked(7, rest=9))
    found = known(made)
    assert found.runs() == [("dram", 4), ("displaced", 1), ("never_stored", 2)]
    assert (found.hit, found.asked) == (4 * C, 7 * C + 9)
    assert found.missed == {Reason.DISPLACED: C, Reason.NEVER_STORED: 2 * C + 9}
    assert found.keys == asked(7).keys


def known_column(made: Ledger, prompt: Prompt, depth: int):  # type: ignore[no-untyped-def]
    return made._stock.maps_of(prompt.maker)[0].columns[prompt.keys[depth]]


def test_hits_that_were_left_have_their_reason_and_what_is_learned_later_is_told() -> None:
    made = ledger(8)
    store(made, asked(4))
    match = made.match(asked(6), 0)
    made.shorten(match, C, Reason.NOT_WORTH_IT)
    made.release(match)
    made.log_request(match, 0)
    assert known(made).runs() == [("dram", 1), ("not_worth_it", 3), ("never_stored", 2)]
    made._stock.ghosts.add(asked(6).keys[5], Reason.TIER2_LATE)
    made.recount(match, 1)
    found = known(made)
    assert found.runs() == [("dram", 1), ("not_worth_it", 3), ("never_stored", 1), ("tier2_late", 1)]
    assert found.at == 0


def test_what_lies_in_another_namespace_is_told_as_that() -> None:
    made = ledger(8)
    store(made, asked(2))
    other = Keys("acme", SECRET, type(NAMESPACE)("llama", "another", "bf16", "x"))
    loaded(made, other.prompt(range(2 * C + 1), "r-1"))
    assert known(made).runs() == [("other_namespace", 2)]


def test_a_request_without_a_name_is_not_remembered_and_one_that_comes_again_is_once() -> None:
    made = ledger(8)
    loaded(made, asked(2, request=""))
    assert made._stock.requests.newest("acme", 10) == []
    loaded(made, asked(2))
    store(made, asked(2))
    loaded(made, asked(2), 5)
    [found] = made._stock.requests.newest("acme", 10)
    assert (found.hit, found.at) == (2 * C, 5)


def test_what_is_learned_late_is_not_told_of_another_request_of_that_name() -> None:
    made = ledger(8)
    first = loaded(made, asked(3))
    loaded(made, asked(5), 1.0)  # as an engine asks again that had to give its blocks up
    made.recount(first, 2.0)
    assert (known(made).asked, known(made).at) == (5 * C, 1.0)


def test_each_org_has_its_own_and_a_purge_takes_them_along() -> None:
    made = ledger(8, acme=Policy(), globex=Policy())
    for org in ("acme", "globex"):
        loaded(made, asked(1, org=org))
        loaded(made, asked(1, "r-2", org=org))
    assert [one.request for one in made._stock.requests.newest("acme", 10)] == ["r-2", "r-1"]
    made.purge("acme")
    assert made._stock.requests.find("acme", "r-1") is None
    assert made._is_current(known(made, org="globex").maker)
    assert not made._is_current(Keys("globex", b"another secret of an org, as long as that", NAMESPACE))


def test_there_is_an_end_to_requests_and_to_their_columns() -> None:
    made = ledger(8)
    made._stock.requests = RequestLog(requests_max=3, columns_max=20)
    for number in range(5):
        loaded(made, asked(1, f"r-{number}"))
    assert [one.request for one in made._stock.requests.newest("acme", 9)] == ["r-4", "r-3", "r-2"]
    loaded(made, asked(19, "long"))
    assert [one.request for one in made._stock.requests.newest("acme", 9)] == ["long", "r-4"]
    loaded(made, asked(21, "too long"))
    assert made._stock.requests.newest("acme", 9) == []
    loaded(made, asked(20, "as long as may be"))
    assert len(made._stock.requests.newest("acme", 9)) == 1, "what has gone takes no room"


def continued(made: Conversations, org: str, *names: str, columns: int = 4) -> None:
    for name in names:
        made.add(name, asked(columns, org=org))


def test_an_org_with_many_conversations_pushes_out_its_own() -> None:
    made = Conversations(keys_max=100)  # ten of four keys each
    continued(made, "globex", "theirs")
    continued(made, "acme", *(f"chat-{number}" for number in range(1000)))
    assert made.find("globex", "theirs")
    assert [name for (org, name), _ in made.items() if org == "acme"] == [
        f"chat-{number}" for number in range(991, 1000)
    ]


def test_an_org_that_has_less_than_its_share_takes_from_the_one_with_the_most() -> None:
    made = Conversations(keys_max=100)
    continued(made, "acme", *(f"chat-{number}" for number in range(10)))
    continued(made, "globex", *(f"chat-{number}" for number in range(10)))
    kept = Counter(org for (org, _), _ in made.items())
    assert kept == {"acme": 5, "globex": 5}
    made.forget("acme")
    continued(made, "globex", *(f"more-{number}" for number in range(5)))
    assert len(list(made.items())) == 10


def test_a_conversation_that_is_longer_than_there_is_room_for_is_not_known() -> None:
    made = Conversations(keys_max=100)
    continued(made, "acme", "long", columns=200)
    assert list(made.items()) == []
    continued(made, "acme", "short")
    assert made.find("acme", "short")


def test_a_conversation_that_another_makes_way_for_costs_no_more_than_one_before() -> None:
    """However many have made way. The ledger's lock is held."""
    kept = Conversations(1 << 18)
    maker = Keys("acme", SECRET, NAMESPACE)
    seconds = []
    for first in range(0, 300_000, 30_000):
        began = time.thread_time()
        for number in range(first, first + 30_000):
            kept.add(f"chat-{number}", PromptKeys(maker, [b"%016d" % number] * 2))
        seconds.append(time.thread_time() - began)
    assert max(seconds[2:]) < 4 * seconds[0], "seven times as much, where each is looked for"
