"""Who is asking is what a gateway has signed, for this driver and a minute; nobody else is anybody."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import jwt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swdriver_shim.adapters.claims import SECONDS_MAX, Claim, ClaimRefusal, ClaimVerifier, mint
from swdriver_shim.policy import Rules

KEY = b"a key that gateway and engine share"


def payload(age: float = 0, good_for: float = 60, **other: Any) -> dict[str, Any]:
    issued = time.time() - age
    until = issued + good_for
    good = {"iss": "tidegate-gateway", "aud": "job7", "sub": "acme", "iat": issued, "exp": until}
    return {name: value for name, value in {**good, **other}.items() if value is not None}


def signed(key: bytes = KEY, algorithm: str = "HS256", **other: Any) -> str:
    return jwt.encode(payload(**other), key, algorithm=algorithm)


def test_a_claim_says_whose_a_request_is_and_what_it_wishes() -> None:
    verifier = ClaimVerifier(KEY, "job7")
    assert verifier.verify(mint(KEY, "job7", "acme")) == Claim("acme")
    rules = Rules(no_store=True, ttl_seconds=60, priority=80, continue_id="chat-7")
    assert verifier.verify(mint(KEY, "job7", "globex", rules)) == Claim("globex", rules)
    lent = mint(KEY, "job7", "globex", rules, sibling="job8")
    assert verifier.verify(lent) == Claim("globex", rules, "job8")
    assert verifier.verify(signed()) == Claim("acme")
    assert not verifier.refused


@pytest.mark.parametrize(
    ("token", "why"),
    [
        (lambda: None, ClaimRefusal.NONE),
        (lambda: 7, ClaimRefusal.MALFORMED),
        (lambda: "", ClaimRefusal.MALFORMED),
        (lambda: "acme", ClaimRefusal.MALFORMED),
        (lambda: "x" * 5000, ClaimRefusal.MALFORMED),
        (lambda: "\ud800.a.b", ClaimRefusal.MALFORMED),  # as JSON may say it: no text that has bytes
        (lambda: jwt.utils.base64url_encode(b"[" * 3000).decode() + ".e30.AA", ClaimRefusal.MALFORMED),
        (lambda: signed(exp=float("inf")), ClaimRefusal.MALFORMED),
        (lambda: signed(iat=float("nan")), ClaimRefusal.MALFORMED),
        (lambda: signed(sibling=["job8"]), ClaimRefusal.MALFORMED),
        (lambda: signed(KEY[::-1]), ClaimRefusal.SIGNATURE),
        (lambda: signed(KEY * 2, algorithm="HS512"), ClaimRefusal.MALFORMED),
        (lambda: jwt.encode(payload(), "", algorithm="none"), ClaimRefusal.MALFORMED),
        (lambda: signed(age=70), ClaimRefusal.EXPIRED),
        (lambda: signed(aud="job8"), ClaimRefusal.AUDIENCE),
        (lambda: signed(aud=["job7", "job8"]), ClaimRefusal.AUDIENCE),
        (lambda: signed(aud=None), ClaimRefusal.MALFORMED),
        (lambda: signed(iss="somebody"), ClaimRefusal.MALFORMED),
        (lambda: signed(iss=None), ClaimRefusal.MALFORMED),
        (lambda: signed(sub=None), ClaimRefusal.MALFORMED),
        (lambda: signed(sub=""), ClaimRefusal.MALFORMED),
        (lambda: signed(exp=None), ClaimRefusal.MALFORMED),
        (lambda: signed(iat=None), ClaimRefusal.MALFORMED),
        (lambda: signed(age=-100), ClaimRefusal.EARLY),
        (lambda: signed(iat=str(int(time.time()))), ClaimRefusal.MALFORMED),
        (lambda: signed(exp=str(int(time.time()) + 60)), ClaimRefusal.MALFORMED),
        (lambda: signed(good_for=SECONDS_MAX + 10), ClaimRefusal.TOO_LONG),
        (lambda: signed(rules={"priority": 101}), ClaimRefusal.RULES),
        (lambda: signed(rules={"tiers": "dram"}), ClaimRefusal.RULES),
        (lambda: signed(rules=7), ClaimRefusal.RULES),
    ],
)
def test_whatever_is_not_valid_is_nobody_and_counted(
    token: Callable[[], object], why: ClaimRefusal
) -> None:
    verifier = ClaimVerifier(KEY, "job7")
    assert verifier.verify(token()) is why
    assert verifier.refused == {why: 1}


@given(
    st.text(st.characters(exclude_categories=()))
    | st.binary()
    | st.integers()
    | st.lists(st.text())
    | st.dictionaries(st.text(), st.text())
)
def test_nothing_that_a_client_writes_raises(token: object) -> None:
    assert isinstance(ClaimVerifier(KEY, "job7").verify(token), ClaimRefusal)


@given(st.data())
def test_one_changed_letter_is_enough(data: st.DataObject) -> None:
    token = mint(KEY, "job7", "acme")
    at = data.draw(st.integers(0, len(token) - 2))  # the last one has bits that do not count
    letter = "A" if token[at] != "A" else "B"
    assert isinstance(
        ClaimVerifier(KEY, "job7").verify(token[:at] + letter + token[at + 1 :]), ClaimRefusal
    )


def test_neither_token_nor_key_is_logged_and_not_every_refusal_is(
    caplog: pytest.LogCaptureFixture,
) -> None:
    token, now = signed(KEY[::-1]), [0.0]
    verifier = ClaimVerifier(KEY, "job7", clock=lambda: now[0])
    for _ in range(100):
        verifier.verify(token)
    now[0] = 61.0
    verifier.verify(token)
    assert len(caplog.records) == 2
    assert token not in caplog.text
    assert "bad_signature" in caplog.text


def test_what_is_no_claim_can_not_be_minted() -> None:
    for key, audience, org, seconds in [
        (b"short", "job7", "acme", 60),
        (KEY, "", "acme", 60),
        (KEY, "job7", "", 60),
        (KEY, "job7", "acme", 0),
        (KEY, "job7", "acme", SECONDS_MAX + 1),
    ]:
        with pytest.raises(ValueError, match=r"a claim|a key"):
            mint(key, audience, org, seconds=seconds)
    with pytest.raises(ValueError, match="a key"):
        ClaimVerifier(b"short", "job7")
