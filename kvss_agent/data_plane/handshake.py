"""How driver and agent convince each other and agree on a version. Pure.

    driver: HELLO      who, which shard, what for, versions and features, a nonce
    agent:  CHALLENGE  the version and features to use, a nonce, proof that it knows the driver's secret
    driver: PROOF      proof that it knows it too
    agent:  WELCOME    how the shard stands

A proof is an HMAC over everything said so far, so it fits this conversation only, and nobody in the
middle can talk the two into an older version. Over TLS both have shown certificates already, and the
proofs are empty.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from dataclasses import replace

from kvss_agent.data_plane import wire
from kvss_agent.data_plane.breach import Breach, Cause
from kvss_agent.data_plane.wire import Challenge, Hello, Means, Proof, Role


def hello(role: Role, driver: str, shard: str, *, versions: tuple[int, int], software: str) -> Hello:
    lowest, highest = versions
    nonce = secrets.token_bytes(wire.NONCE_BYTES)
    return Hello(role, driver, shard, nonce, lowest, highest, software=software)


def agree(said: Hello, versions: tuple[int, int]) -> int:
    """The highest version that both speak."""
    lowest, highest = max(said.version_min, versions[0]), min(said.version_max, versions[1])
    if lowest > highest:
        raise Breach(
            Cause.VERSION,
            f"the driver speaks versions {said.version_min} to {said.version_max}, "
            f"this agent {versions[0]} to {versions[1]}",
        )
    return highest


def challenge(said: Hello, secret: bytes | None, *, version: int, features: int) -> Challenge:
    """The agent's answer. Without a secret it is TLS that vouches."""
    nonce = secrets.token_bytes(wire.NONCE_BYTES)
    means = Means.CERTIFICATE if secret is None else Means.SECRET
    unproven = Challenge(version, means, features, nonce, bytes(wire.PROOF_BYTES))
    return unproven if secret is None else _proven(said, unproven, secret)


def prove(said: Hello, got: Challenge, secret: bytes | None) -> Proof:
    """The driver's answer; a breach if the agent does not know the secret that we share."""
    if not said.version_min <= got.version <= said.version_max:
        raise Breach(
            Cause.VERSION, f"the agent wants version {got.version}, which this driver did not offer"
        )
    if secret is None:
        if got.means is not Means.CERTIFICATE:
            raise Breach(Cause.AUTHENTICATION, "the agent asks for a secret, and none is set")
        return Proof(bytes(wire.PROOF_BYTES))
    if got.means is not Means.SECRET or not hmac.compare_digest(
        got.proof, _proven(said, got, secret).proof
    ):
        raise Breach(Cause.AUTHENTICATION, "the agent does not know the secret")
    return Proof(_hmac(secret, b"driver", said, got))


def check(said: Hello, given: Challenge, got: Proof, secret: bytes | None) -> None:
    """A breach if the driver does not know its secret."""
    if secret is None:
        return
    if not hmac.compare_digest(got.proof, _hmac(secret, b"driver", said, given)):
        raise Breach(Cause.AUTHENTICATION, "unknown driver or wrong secret")


def _proven(said: Hello, given: Challenge, secret: bytes) -> Challenge:
    unproven = replace(given, proof=bytes(wire.PROOF_BYTES))
    return replace(given, proof=_hmac(secret, b"agent", said, unproven))


def _hmac(secret: bytes, side: bytes, said: Hello, given: Challenge) -> bytes:
    return hmac.new(secret, side + said.encode() + given.encode(), hashlib.sha256).digest()
