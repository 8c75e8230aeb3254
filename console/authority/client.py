"""How processes of the console connect to agents and drivers: as the console, and to nobody else.

tls = client.context()                          # in the database's reach; follows what is current
name = client.server_name(node.public_key)      # which certificate has to be shown
"""

from __future__ import annotations

import ssl
import threading
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from django.utils import timezone

from console.authority import services
from console.authority.services import CONSOLE_LIFE
from kvss_agent.security.certificates import Role, key_name
from kvss_agent.security.identity import fingerprint, public_pem
from kvss_agent.security.trust import RENEW_AT, load_chain

NAME: Final = "console"


@dataclass(frozen=True, slots=True)
class _Held:
    digest: str
    renew_at: datetime
    context: ssl.SSLContext


_held: _Held | None = None
_lock: Final = threading.Lock()


def context() -> ssl.SSLContext:
    """For connections from now on. The key is this process's own, and only in its memory, if the system
    has files there."""
    global _held  # noqa: PLW0603 - one for each process, as its key
    current = services.bundle()
    with _lock:
        if _held is None or _held.digest != current.digest or timezone.now() >= _held.renew_at:
            _held = _made()
        return _held.context


def server_name(public_key: str) -> str:
    """The name in the certificate of the process with this key, and in no other's."""
    return key_name(fingerprint(public_key))


def _made() -> _Held:
    key = ec.generate_private_key(ec.SECP256R1())
    issued = services.issue(Role.CONSOLE, NAME, public_pem(key.public_key()))
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    made.minimum_version = ssl.TLSVersion.TLSv1_3
    key_pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    load_chain(made, issued.certificate, key_pem)
    made.load_verify_locations(cadata=issued.bundle.authorities)
    return _Held(issued.bundle.digest, timezone.now() + CONSOLE_LIFE * RENEW_AT, made)
