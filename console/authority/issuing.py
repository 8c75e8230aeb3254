"""Making certificates. Pure: no database, no settings."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
    load_pem_public_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from kvss_agent.security.certificates import CLOCK_SKEW, Peer, alternative_names, fingerprint_of

AUTHORITY_LIFE: Final = timedelta(days=3650)
_DETERMINISTIC: Final = ec.ECDSA(hashes.SHA256(), deterministic_signing=True)


@dataclass(frozen=True, slots=True)
class Root:
    """A root certificate and its key, as PEM."""

    certificate: str
    key: str
    fingerprint: str
    expires_at: datetime


class Signer:
    """What an authority signs with."""

    def __init__(self, certificate: str, key: str) -> None:
        self.certificate = x509.load_pem_x509_certificate(certificate.encode())
        loaded = load_pem_private_key(key.encode(), password=None)
        if not isinstance(loaded, ec.EllipticCurvePrivateKey):
            raise TypeError("authorities have keys on the curve P-256")
        self._key = loaded

    def sign(self, payload: bytes) -> bytes:
        """ECDSA with SHA-256. The same payload has the same signature."""
        return self._key.sign(payload, _DETERMINISTIC)

    def issue(self, peer: Peer, public_key_pem: str, life: timedelta, now: datetime) -> str:
        """A certificate that says that the key is this peer's, for both ends of TLS."""
        public = load_pem_public_key(public_key_pem.encode())
        if not isinstance(public, ec.EllipticCurvePublicKey):
            raise TypeError("processes have keys on the curve P-256")
        builder = x509.CertificateBuilder(
            issuer_name=self.certificate.subject,
            subject_name=_named(peer.topic[:64]),
            public_key=public,
            serial_number=x509.random_serial_number(),
            not_valid_before=now - CLOCK_SKEW,
            not_valid_after=min(now + life, self.certificate.not_valid_after_utc),
        )
        usages = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        for extension, critical in (
            (x509.BasicConstraints(ca=False, path_length=None), True),
            (_usage(signs_certificates=False), True),
            (x509.ExtendedKeyUsage(usages), False),
            (x509.SubjectAlternativeName(alternative_names(peer)), False),
            (x509.SubjectKeyIdentifier.from_public_key(public), False),
            (issuer, False),
        ):
            builder = builder.add_extension(extension, critical)
        return builder.sign(self._key, hashes.SHA256()).public_bytes(Encoding.PEM).decode()


def make_root(name: str, now: datetime) -> Root:
    """A new root, which may sign certificates of processes and of nobody else."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject, expires_at = _named(name), now + AUTHORITY_LIFE
    builder = x509.CertificateBuilder(
        issuer_name=subject,
        subject_name=subject,
        public_key=key.public_key(),
        serial_number=x509.random_serial_number(),
        not_valid_before=now - CLOCK_SKEW,
        not_valid_after=expires_at,
    )
    for extension, critical in (
        (x509.BasicConstraints(ca=True, path_length=0), True),
        (_usage(signs_certificates=True), True),
        (x509.SubjectKeyIdentifier.from_public_key(key.public_key()), False),
    ):
        builder = builder.add_extension(extension, critical)
    made = builder.sign(key, hashes.SHA256())
    return Root(
        made.public_bytes(Encoding.PEM).decode(),
        key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode(),
        fingerprint_of(made),
        expires_at,
    )


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
    )
