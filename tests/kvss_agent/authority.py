"""A certificate authority."""

from __future__ import annotations

import datetime
import ipaddress
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

NOW = datetime.datetime.now(datetime.UTC)
DAY = datetime.timedelta(days=1)


@dataclass(frozen=True)
class Authority:
    """Signs certificates, and keeps them as files."""

    directory: Path
    name: str
    key: ec.EllipticCurvePrivateKey
    certificate: x509.Certificate

    @classmethod
    def make(cls, directory: Path, name: str = "fleet") -> Authority:
        directory.mkdir(exist_ok=True)
        key = ec.generate_private_key(ec.SECP256R1())
        made = cls(directory, name, key, _certificate(name, key, name, key, authority=True))
        (directory / f"{name}.pem").write_bytes(_pem(made.certificate))
        return made

    def issue(
        self, name: str, *, ends: datetime.datetime = NOW + DAY, has_address: bool = True
    ) -> tuple[Path, Path, Path]:
        """Certificate, key and authorities, as files. `has_address`: it is for 127.0.0.1, too."""
        key = ec.generate_private_key(ec.SECP256R1())
        signed = _certificate(name, key, self.name, self.key, ends=ends, has_address=has_address)
        stem = self.directory / f"{name}-{ends:%Y%m%d}"
        stem.with_suffix(".crt").write_bytes(_pem(signed))
        stem.with_suffix(".key").write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
        )
        return stem.with_suffix(".crt"), stem.with_suffix(".key"), self.directory / f"{self.name}.pem"


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _certificate(
    name: str,
    key: ec.EllipticCurvePrivateKey,
    by: str,
    by_key: ec.EllipticCurvePrivateKey,
    *,
    authority: bool = False,
    ends: datetime.datetime = NOW + DAY,
    has_address: bool = True,
) -> x509.Certificate:
    names: list[x509.GeneralName] = [x509.DNSName(name)]
    if has_address:
        names.append(x509.IPAddress(ipaddress.ip_address("127.0.0.1")))
    return (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
        .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, by)]))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(NOW - 10 * DAY)
        .not_valid_after(ends)
        .add_extension(x509.BasicConstraints(ca=authority, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(by_key.public_key()), critical=False
        )
        .sign(by_key, hashes.SHA256())
    )
