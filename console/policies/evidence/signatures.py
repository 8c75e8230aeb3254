"""Statements that others can hold us to: JSON, signed with a key that only this console has."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Final

import jwt
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from django.conf import settings

from console.shell.sealed import derived

PURPOSE: Final = b"tidegate: signed statements, 1"
ALGORITHM: Final = "EdDSA"


def sign(statement: Mapping[str, Any]) -> str:
    """The statement as a JWS. Anyone can verify it with the key of `public_keys` that it names."""
    key = _keys()[0]
    headers = {"kid": key_id(key), "typ": "tidegate+jws"}
    return jwt.encode(dict(statement), key, algorithm=ALGORITHM, headers=headers)


def public_keys() -> list[dict[str, str]]:
    """As a JWK set has them; those of former secret keys too, for what was signed then."""
    return [
        {
            "kty": "OKP",
            "crv": "Ed25519",
            "use": "sig",
            "alg": ALGORITHM,
            "kid": key_id(key),
            "x": _x(key),
        }
        for key in _keys()
    ]


def key_id(key: Ed25519PrivateKey) -> str:
    return hashlib.sha256(_raw(key)).hexdigest()[:16]


def _keys() -> tuple[Ed25519PrivateKey, ...]:
    return _derived(settings.SECRET_KEY, *settings.SECRET_KEY_FALLBACKS)


@lru_cache(maxsize=8)
def _derived(*secret_keys: str) -> tuple[Ed25519PrivateKey, ...]:
    """The first signs."""
    return tuple(Ed25519PrivateKey.from_private_bytes(derived(key, PURPOSE)) for key in secret_keys)


def _raw(key: Ed25519PrivateKey) -> bytes:
    return key.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)


def _x(key: Ed25519PrivateKey) -> str:
    return base64.urlsafe_b64encode(_raw(key)).rstrip(b"=").decode()
