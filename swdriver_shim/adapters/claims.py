"""Who is asking: a short-lived signed claim that a gateway puts beside each request to an engine.

What clients send to an engine is theirs to choose, `cache_salt` and all; so the org must come from
somebody who has checked it. That is the gateway: it knows the caller, shares a key with the engine's
driver, and signs the org, for this driver only and for a short time, with what the request wishes:

    mint(key, "job7", "acme", Rules(no_store=True))    # in the gateway
    claimed = Judge(key, "job7").judge(token)          # in the engine

It is a JWT with HMAC-SHA256, so that a gateway in any language can make it:
`{"iss": "tidegate-gateway", "aud": driver, "sub": org, "iat": …, "exp": …, "rules": {…}}`.

Whoever has no claim, or one that is not valid, is nobody in particular: never an error for the engine.
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

from swdriver_shim.policy import AS_USUAL, Rules

log = logging.getLogger(__name__)

ISSUER: Final = "tidegate-gateway"
ALGORITHM: Final = "HS256"
KEY_BYTES_MIN: Final = 32
TOKEN_LENGTH_MAX: Final = 4096
SECONDS: Final = 60  # for which a claim is good, unless it is said
SECONDS_MAX: Final = 24 * 3600
LEEWAY_SECONDS: Final = 5  # clocks of gateways may differ by so much
LOG_SECONDS: Final = 60.0  # between two lines about claims that are not valid


def carried_by(params: object) -> object:
    """By a request's `kv_transfer_params`, which may be anything that JSON can: vLLM takes them from
    `vllm_xargs` as well, and there they need not be an object."""
    return params.get("tidegate") if isinstance(params, dict) else None


class ClaimRefusal(StrEnum):
    """Why a claim is not followed. None of it is told to the client."""

    NONE = "unsigned"
    MALFORMED = "malformed"
    SIGNATURE = "bad_signature"
    EXPIRED = "expired"
    TOO_LONG = "too_long"  # it is good for longer than a claim may be
    AUDIENCE = "other_audience"
    RULES = "bad_rules"


@dataclass(frozen=True, slots=True)
class Claim:
    """In whose name, and what the request wishes."""

    org: str
    rules: Rules = AS_USUAL


def mint(
    key: bytes,
    audience: str,
    org: str,
    rules: Rules = AS_USUAL,
    *,
    seconds: int = SECONDS,
    now: float | None = None,
) -> str:
    """A claim on this org, for the driver `audience`. Raises ValueError."""
    check_key(key)
    if not org or not audience or not 0 < seconds <= SECONDS_MAX:
        raise ValueError(f"a claim names an org and a driver, and is good for 1 to {SECONDS_MAX} s")
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
    return jwt.encode(payload, key, algorithm=ALGORITHM)


def check_key(key: bytes) -> None:
    if len(key) < KEY_BYTES_MIN:
        raise ValueError(f"a key for claims has {KEY_BYTES_MIN} bytes or more")


class ClaimVerifier:
    """Says whose a claim is. Counts what it refuses, by reason."""

    def __init__(
        self, key: bytes, audience: str, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        check_key(key)
        self.refused: Counter[ClaimRefusal] = Counter()
        self._key = key
        self._audience = audience
        self._clock = clock
        self._logged_at = -LOG_SECONDS

    def judge(self, token: object) -> Claim | ClaimRefusal:
        """Of whatever a request carries. Raises nothing."""
        found = self._judged(token)
        if isinstance(found, ClaimRefusal):
            self.refused[found] += 1
            now = self._clock()
            if found is not ClaimRefusal.NONE and now >= self._logged_at + LOG_SECONDS:
                self._logged_at = now
                log.warning("A claim is not valid and is not followed: %s", found)
        return found

    def _judged(self, token: object) -> Claim | ClaimRefusal:
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
        except jwt.InvalidAudienceError:
            return ClaimRefusal.AUDIENCE
        except (jwt.PyJWTError, UnicodeEncodeError):  # JSON may carry what is no text
            return ClaimRefusal.MALFORMED
        issued, until = told["iat"], told["exp"]
        if not told["sub"] or isinstance(issued, str) or isinstance(until, str):
            return ClaimRefusal.MALFORMED
        if until - issued > SECONDS_MAX:
            return ClaimRefusal.TOO_LONG
        try:
            return Claim(told["sub"], msgspec.convert(told.get("rules", {}), Rules))
        except msgspec.ValidationError:
            return ClaimRefusal.RULES
