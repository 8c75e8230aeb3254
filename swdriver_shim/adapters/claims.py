"""Signed claims: short-lived tokens that a gateway adds to each request, to say which org it is for.

Clients choose what they send to an engine, `cache_salt` included, so the org has to come from the
gateway, which has authenticated the caller. It shares a key with the engine's driver, and signs the org
and the request's rules, for this driver only and for a short time:

    mint(key, "job7", "acme", Rules(no_store=True))    # in the gateway
    claim = ClaimVerifier(key, "job7").verify(token)          # in the engine

It is a JWT with HMAC-SHA256, so that a gateway in any language can make it:
`{"iss": "tidegate-gateway", "aud": driver, "sub": org, "iat": …, "exp": …, "rules": {…}, "sibling": …}`.
The last two may be left out. `sibling` is the driver that the prompt is to be borrowed from: a request
that carries it can't arrive before it is known.

A request without a valid claim is cached for nobody; that is never an error for the engine.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

import jwt
import msgspec

from swdriver_shim.desired import CLAIMS_KEY_BYTES_MIN
from swdriver_shim.policy import AS_USUAL, Rules

log = logging.getLogger(__name__)

ISSUER: Final = "tidegate-gateway"
ALGORITHM: Final = "HS256"
TOKEN_LENGTH_MAX: Final = 4096
SECONDS: Final = 60  # that a claim is valid by default
SECONDS_MAX: Final = 24 * 3600
LEEWAY_SECONDS: Final = 5  # clocks of gateways may differ by so much
LOG_SECONDS: Final = 60.0  # between two lines about claims that are not valid


def carried_by(params: object) -> object:
    """The claim in a request's `kv_transfer_params`. These may be any JSON: vLLM also takes them from
    `vllm_xargs`, where they need not be an object."""
    return params.get("tidegate") if isinstance(params, dict) else None


class ClaimRefusal(StrEnum):
    """Why a claim is not valid. Clients are not told."""

    NONE = "unsigned"
    MALFORMED = "malformed"
    SIGNATURE = "bad_signature"
    EXPIRED = "expired"
    EARLY = "not_yet_valid"
    TOO_LONG = "too_long"  # it is valid for longer than a claim may be
    AUDIENCE = "other_audience"
    RULES = "bad_rules"


@dataclass(frozen=True, slots=True)
class Claim:
    """The org that a request is for, the request's rules, and the driver that its prompt is to be
    borrowed from, empty for none."""

    org: str
    rules: Rules = AS_USUAL
    sibling: str = ""


def mint(
    key: bytes,
    audience: str,
    org: str,
    rules: Rules = AS_USUAL,
    *,
    sibling: str = "",
    seconds: int = SECONDS,
    now: float | None = None,
) -> str:
    """Sign a claim of this org for the driver `audience`. Raises ValueError."""
    check_key(key)
    if not org or not audience or not 0 < seconds <= SECONDS_MAX:
        raise ValueError(f"a claim names an org and a driver, and is valid for 1 to {SECONDS_MAX} s")
    issued = int(time.time() if now is None else now)
    payload: dict[str, Any] = {
        "iss": ISSUER,
        "aud": audience,
        "sub": org,
        "iat": issued,
        "exp": issued + seconds,
    }
    if rules != AS_USUAL:
        payload["rules"] = msgspec.to_builtins(rules)
    if sibling:
        payload["sibling"] = sibling
    return jwt.encode(payload, key, algorithm=ALGORITHM)


def check_key(key: bytes) -> None:
    if len(key) < CLAIMS_KEY_BYTES_MIN:
        raise ValueError(f"a key for claims has {CLAIMS_KEY_BYTES_MIN} bytes or more")


class ClaimVerifier:
    """Verifies claims, and counts refused ones by reason."""

    def __init__(
        self, key: bytes, audience: str, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        check_key(key)
        self.refused: Counter[ClaimRefusal] = Counter()
        self._key = key
        self._audience = audience
        self._clock = clock
        self._logged_at = -LOG_SECONDS

    def verify(self, token: object) -> Claim | ClaimRefusal:
        """Verify whatever a request carries. Raises nothing."""
        found = self._checked(token)
        if isinstance(found, ClaimRefusal):
            self.refused[found] += 1
            now = self._clock()
            if found is not ClaimRefusal.NONE and now >= self._logged_at + LOG_SECONDS:
                self._logged_at = now
                log.warning("A claim is not valid and is ignored: %s", found)
        return found

    def _checked(self, token: object) -> Claim | ClaimRefusal:
        if token is None:
            return ClaimRefusal.NONE
        if not isinstance(token, str) or len(token) > TOKEN_LENGTH_MAX:
            return ClaimRefusal.MALFORMED
        try:
            told = jwt.decode(
                token,
                self._key,
                algorithms=[ALGORITHM],
                audience=self._audience,
                issuer=ISSUER,
                leeway=LEEWAY_SECONDS,
                options={"require": ["iss", "aud", "sub", "iat", "exp"], "strict_aud": True},
            )
        except jwt.InvalidSignatureError:
            return ClaimRefusal.SIGNATURE
        except jwt.ExpiredSignatureError:
            return ClaimRefusal.EXPIRED
        except jwt.ImmatureSignatureError:  # the gateway's clock is ahead
            return ClaimRefusal.EARLY
        except jwt.InvalidAudienceError:
            return ClaimRefusal.AUDIENCE
        # JSON may carry what is no text, has no end, or nests too deeply: not every version of PyJWT
        # says so itself, and whoever asks an engine can send it.
        except (jwt.PyJWTError, ArithmeticError, RecursionError, TypeError, ValueError):
            return ClaimRefusal.MALFORMED
        issued, until, sibling = told["iat"], told["exp"], told.get("sibling", "")
        if not told["sub"] or isinstance(issued, str) or isinstance(until, str):
            return ClaimRefusal.MALFORMED
        if not isinstance(sibling, str):
            return ClaimRefusal.MALFORMED
        if until - issued > SECONDS_MAX:
            return ClaimRefusal.TOO_LONG
        try:
            return Claim(told["sub"], msgspec.convert(told.get("rules", {}), Rules), sibling)
        except msgspec.ValidationError:
            return ClaimRefusal.RULES
