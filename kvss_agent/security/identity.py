"""The identity of a process: an EC P-256 key that it makes at its first start and never hands out.

    identity = ProcessIdentity.load(state_dir, "node:ax-1")
    signature = identity.sign(payload)
    verify(identity.public_key_pem, payload, signature)     # where only the public key is known

The console binds the public key to the name when the process joins, and issues certificates for it. It
decides what names a certificate has; a certificate request carries the key and proves that it is held.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
    load_pem_public_key,
)
from cryptography.x509.oid import NameOID

from kvss_agent.process.durable_file import write_durably

KEY_FILE: Final = "identity.key"
PEM_BYTES_MAX: Final = 4096  # of a key or of a certificate request
COMMON_NAME_MAX: Final = 64
# Before everything that is signed, so that no signature of one kind passes for another, nor for one that
# a certificate or a TLS handshake has.
CONTEXT: Final = b"tidegate process signature 1\0"
_ALGORITHM: Final = ec.ECDSA(hashes.SHA256())
_DETERMINISTIC: Final = ec.ECDSA(hashes.SHA256(), deterministic_signing=True)


class Unusable(ValueError):
    """Why a key or a certificate request cannot be used, in a sentence."""


class ProcessIdentity:
    """The key of one process, and what is done with it."""

    def __init__(self, key: ec.EllipticCurvePrivateKey, topic: str, state_dir: Path) -> None:
        self.topic = topic
        self.state_dir = state_dir
        self.public_key_pem = public_pem(key.public_key())
        self.key = key

    @classmethod
    def load(cls, state_dir: Path, topic: str) -> ProcessIdentity:
        """The key in the state directory; it is made at the first start. `topic` is `node:ax-1` or
        `driver:job7`. Raises OSError, and Unusable for a file that holds no such key."""
        return cls(_load_or_make(state_dir / KEY_FILE), topic, state_dir)

    def sign(self, payload: bytes) -> bytes:
        """ECDSA with SHA-256 over the payload. The same payload has the same signature."""
        return self.key.sign(CONTEXT + payload, _DETERMINISTIC)

    def key_pem(self) -> bytes:
        """The private key, for TLS contexts of this process."""
        return self.key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())

    def certificate_request(self) -> str:
        """A PEM certificate request: the public key, and the proof that we hold the private one."""
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, self.topic[:COMMON_NAME_MAX])])
        request = x509.CertificateSigningRequestBuilder().subject_name(subject)
        return request.sign(self.key, hashes.SHA256()).public_bytes(Encoding.PEM).decode()


def verify(public_key_pem: str, payload: bytes, signature: bytes) -> bool:
    """Whether the process with this public key has signed exactly this payload."""
    try:
        key = _p256(load_pem_public_key(public_key_pem.encode()))
        key.verify(signature, CONTEXT + payload, _ALGORITHM)
    except (InvalidSignature, UnsupportedAlgorithm, ValueError):
        return False
    return True


def requested_key(certificate_request: str) -> str:
    """The public key (PEM) that a certificate request asks for, whoever it names. Raises Unusable."""
    if len(certificate_request) > PEM_BYTES_MAX:
        raise Unusable(f"A certificate request has at most {PEM_BYTES_MAX} bytes.")
    try:
        request = x509.load_pem_x509_csr(certificate_request.encode())
        key = _p256(request.public_key())
        is_proven = request.is_signature_valid
    except (UnsupportedAlgorithm, ValueError, x509.InvalidVersion) as error:
        raise Unusable("This is not a PEM certificate request for an EC P-256 key.") from error
    if not is_proven:
        raise Unusable("The certificate request is not signed with the key that it asks for.")
    return public_pem(key)


def fingerprint(public_key_pem: str) -> str:
    """The SHA-256 of a public key's SubjectPublicKeyInfo, in hex. Raises Unusable."""
    try:
        key = _p256(load_pem_public_key(public_key_pem.encode()))
    except (UnsupportedAlgorithm, ValueError) as error:
        raise Unusable("This is not a PEM public key on EC P-256.") from error
    return key_fingerprint(key)


def key_fingerprint(key: ec.EllipticCurvePublicKey) -> str:
    der = key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    return hashlib.sha256(der).hexdigest()


def public_pem(key: ec.EllipticCurvePublicKey) -> str:
    return key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo).decode()


def _p256(key: object) -> ec.EllipticCurvePublicKey:
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
        raise Unusable("Keys are on the curve P-256.")
    return key


def _load_or_make(path: Path) -> ec.EllipticCurvePrivateKey:
    """Two processes that start at once get one key, and a crash leaves no half of one."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    if not path.exists():
        made = ec.generate_private_key(ec.SECP256R1())
        pem = made.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        write_durably(path, pem, replace=False)
    try:
        key = load_pem_private_key(path.read_bytes(), password=None)
    except (TypeError, UnsupportedAlgorithm, ValueError) as error:
        raise Unusable(f"{path} holds no key. Remove it and join again.") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey) or not isinstance(key.curve, ec.SECP256R1):
        raise Unusable(f"The key in {path} is not on the curve P-256. Remove it and join again.")
    return key
