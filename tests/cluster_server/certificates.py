"""Certificates as a console's authority issues them."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import grpc
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from console.authority.issuing import Signer, make_root
from kvss_agent.security.certificates import Peer, Role, key_name
from kvss_agent.security.identity import fingerprint, public_pem


@dataclass(frozen=True)
class Shown:
    """A certificate with its key, as PEM, and the name that it is expected under."""

    certificate: str
    key: str
    server_name: str

    def credentials(self, authorities: str) -> grpc.ChannelCredentials:
        return grpc.ssl_channel_credentials(
            authorities.encode(), self.key.encode(), self.certificate.encode()
        )


class ConsoleAuthority:
    def __init__(self) -> None:
        root = make_root("Tidegate authority of a test", datetime.now(UTC))
        self.certificate = root.certificate
        self._signer = Signer(root.certificate, root.key)

    def issue(self, role: Role, name: str) -> Shown:
        key = ec.generate_private_key(ec.SECP256R1())
        public = public_pem(key.public_key())
        peer = Peer(role, name, fingerprint(public))
        made = self._signer.issue(peer, public, timedelta(days=1), datetime.now(UTC))
        private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode()
        return Shown(made, private, key_name(peer.key))

    def write(self, shown: Shown, directory: Path) -> tuple[Path, Path, Path]:
        """Certificate, key and authorities, as files."""
        contents = {"c.pem": shown.certificate, "k.pem": shown.key, "a.pem": self.certificate}
        for name, text in contents.items():
            (directory / name).write_text(text)
        first, second, third = (directory / name for name in contents)
        return first, second, third
