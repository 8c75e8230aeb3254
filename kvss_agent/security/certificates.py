"""What certificates of processes say, and how they are read. Pure.

A certificate names a process and never an address: `tidegate://node/ax-1` as a URI, and as DNS names,
for libraries that verify host names, `KEY.key.tidegate.internal` with the fingerprint of its key, and
`ax-1.node.tidegate.internal`. Whoever connects says which of these it expects. So nothing that a process
claims of itself gets into a certificate, and a certificate of another node is of no use.
"""

from __future__ import annotations

import hashlib
import re
import ssl
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Final
from urllib.parse import urlsplit

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import NameOID

from kvss_agent.security.identity import Unusable, key_fingerprint

SCHEME: Final = "tidegate"
DOMAIN: Final = "tidegate.internal"
BUNDLE_BYTES_MAX: Final = 32 << 10
AUTHORITIES_MAX: Final = 8
CLOCK_SKEW: Final = timedelta(minutes=10)  # between our clocks, before a certificate begins
_LABEL: Final = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
_ALGORITHM: Final = ec.ECDSA(hashes.SHA256())


class Role(StrEnum):
    CONSOLE = "console"
    NODE = "node"
    DRIVER = "driver"
    BRAIN = "brain"
    CLUSTER = "cluster"  # a Cluster Server


@dataclass(frozen=True, slots=True)
class Peer:
    """Who has shown a certificate that one of our authorities has signed."""

    role: Role
    name: str
    key: str  # the fingerprint of its public key

    @property
    def topic(self) -> str:
        return f"{self.role}:{self.name}"


def key_name(key: str) -> str:
    """The host name to expect of a process with a key of this fingerprint. A label has 63 at most."""
    return f"{key[:32]}.{key[32:]}.key.{DOMAIN}"


def process_name(role: Role, name: str) -> str | None:
    """The host name to expect of a process with this name; None for a name that makes none."""
    labels = name.split(".")
    return f"{name}.{role}.{DOMAIN}" if all(map(_LABEL.fullmatch, labels)) else None


def alternative_names(peer: Peer) -> list[x509.GeneralName]:
    names: list[x509.GeneralName] = [
        x509.UniformResourceIdentifier(f"{SCHEME}://{peer.role}/{peer.name}"),
        x509.DNSName(key_name(peer.key)),
    ]
    if by_name := process_name(peer.role, peer.name):
        names.append(x509.DNSName(by_name))
    return names


def peer_of(certificate: x509.Certificate) -> Peer | None:
    """Whom a certificate names; None for one that is not of our kind, such as a hand-made one."""
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return None
    found = [urlsplit(uri) for uri in names.get_values_for_type(x509.UniformResourceIdentifier)]
    ours = [one for one in found if one.scheme == SCHEME]
    key = certificate.public_key()
    if (
        len(ours) != 1
        or ours[0].netloc not in list(Role)
        or not isinstance(key, ec.EllipticCurvePublicKey)
    ):
        return None
    return Peer(Role(ours[0].netloc), ours[0].path.removeprefix("/"), key_fingerprint(key))


def peer_of_connection(connection: ssl.SSLObject | ssl.SSLSocket | None) -> Peer | None:
    """Who is at the other end, by a certificate that was verified in the handshake."""
    shown = connection.getpeercert(binary_form=True) if connection else None
    return peer_of(x509.load_der_x509_certificate(shown)) if shown else None


def read_certificate(pem: str) -> x509.Certificate:
    """Raises Unusable."""
    try:
        return x509.load_pem_x509_certificate(pem.encode())
    except (ValueError, x509.InvalidVersion) as error:
        raise Unusable("This is not a PEM certificate.") from error


def read_authorities(bundle: str) -> list[x509.Certificate]:
    """The authorities in a PEM bundle. Raises Unusable."""
    if len(bundle) > BUNDLE_BYTES_MAX:
        raise Unusable(f"A bundle of authorities has at most {BUNDLE_BYTES_MAX} bytes.")
    try:
        found = x509.load_pem_x509_certificates(bundle.encode())
    except (ValueError, x509.InvalidVersion) as error:
        raise Unusable("This is not a PEM bundle of certificates.") from error
    if not 0 < len(found) <= AUTHORITIES_MAX:
        raise Unusable(f"A bundle has 1 to {AUTHORITIES_MAX} authorities.")
    return found


def is_issued_by(certificate: x509.Certificate, authorities: Iterable[x509.Certificate]) -> bool:
    """Whether one of them has signed it. Says nothing of dates."""
    return any(_has_signed(authority, certificate) for authority in authorities)


def _has_signed(authority: x509.Certificate, certificate: x509.Certificate) -> bool:
    try:
        certificate.verify_directly_issued_by(authority)
    except (InvalidSignature, TypeError, UnsupportedAlgorithm, ValueError):
        return False
    return True


def signed_by_authority(
    authorities: Sequence[x509.Certificate], payload: bytes, signature: bytes, now: datetime
) -> bool:
    """Whether one of the authorities that hold now has signed this payload."""
    return any(
        _verifies(authority, payload, signature)
        for authority in authorities
        if authority.not_valid_before_utc - CLOCK_SKEW <= now < authority.not_valid_after_utc
    )


def _verifies(authority: x509.Certificate, payload: bytes, signature: bytes) -> bool:
    key = authority.public_key()
    if not isinstance(key, ec.EllipticCurvePublicKey):
        return False
    try:
        key.verify(signature, payload, _ALGORITHM)
    except InvalidSignature:
        return False
    return True


def self_signed(key: ec.EllipticCurvePrivateKey, topic: str) -> str:
    """A certificate that nobody trusts, for a server that has none from an authority yet."""
    at = datetime.now(UTC)
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, topic[:64])])
    builder = x509.CertificateBuilder(
        issuer_name=name,
        subject_name=name,
        public_key=key.public_key(),
        serial_number=x509.random_serial_number(),
        not_valid_before=at - CLOCK_SKEW,
        not_valid_after=at + timedelta(days=3650),
    )
    return builder.sign(key, hashes.SHA256()).public_bytes(Encoding.PEM).decode()


def fingerprint_of(certificate: x509.Certificate) -> str:
    return hashlib.sha256(certificate.public_bytes(Encoding.DER)).hexdigest()
