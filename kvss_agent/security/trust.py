"""What a process shows to others and believes of them over TLS, and how both change while it runs.

    trust = Trust.load(identity)
    context = trust.for_control     # one object for the life of a listener; handshakes follow changes
    trust.client_context()              # for one connection
    trust.accept(certificate, authorities, digest)

Before the console has issued a certificate a server shows one that it has signed itself, and nobody who
connects is believed to be anybody.
"""

from __future__ import annotations

import contextlib
import logging
import os
import ssl
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Final

import msgspec
from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec

from kvss_agent.process.durable_file import write_durably
from kvss_agent.security.certificates import (
    is_issued_by,
    peer_of,
    read_authorities,
    read_certificate,
    self_signed,
)
from kvss_agent.security.identity import ProcessIdentity, Unusable, public_pem
from telemetry.decoder import Malformed, decode

log = logging.getLogger(__name__)

CERTIFICATE_FILE: Final = "certificate.json"
AUTHORITIES_FILE: Final = "authorities.pem"  # for whoever connects to us, such as engines
RENEW_AT: Final = 2 / 3  # of its life
DESCRIPTORS: Final = Path("/proc/self/fd")  # the open files of this process, by number


class StoredCertificates(msgspec.Struct, frozen=True):
    """What the console has issued. `digest` names the authorities, and which of them signs."""

    certificate: str = ""
    authorities: str = ""
    digest: str = ""


@dataclass(frozen=True)
class ClientCertificate:
    """What a process shows to others that it connects to: PEM, with its key and whom it believes. It can
    be given to the other processes of an engine, over a socket that only they can open."""

    certificate: str
    key_pem: bytes = field(repr=False)
    authorities: str

    @cached_property
    def context(self) -> ssl.SSLContext:
        return _context(ssl.PROTOCOL_TLS_CLIENT, self.certificate, self.key_pem, self.authorities)


@dataclass(frozen=True, slots=True)
class _Credentials:
    """What holds for the next handshake."""

    stored: StoredCertificates
    server: ssl.SSLContext
    client: ClientCertificate | None
    authorities: Sequence[x509.Certificate]
    renew_at: datetime | None


class Trust:
    """All methods may be called from any thread. What holds is replaced as a whole."""

    def __init__(self, identity: ProcessIdentity, stored: StoredCertificates) -> None:
        """Raises Unusable for what was stored and does not fit our key."""
        self.identity = identity
        self._self_signed = self_signed(identity.key, identity.topic)
        self._now = self._made(stored)
        # Handshakes begin with this one, and go on with what holds at that moment: certificate, key and
        # whom to believe. Tickets would let somebody in again by what held earlier.
        # At a control API somebody without a certificate is nobody; one that is not believed ends it.
        self.for_control = self._listening(ssl.CERT_OPTIONAL)
        self.for_data = self._listening(ssl.CERT_REQUIRED)

    @classmethod
    def load(cls, identity: ProcessIdentity) -> Trust:
        """With the certificate that it was issued last, where that is still there and is ours."""
        try:
            stored = decode((identity.state_dir / CERTIFICATE_FILE).read_bytes(), StoredCertificates)
            return cls(identity, stored)
        except FileNotFoundError:
            pass
        except (Unusable, Malformed) as error:
            log.warning("The stored certificate is unusable; requesting another: %s", error)
        return cls(identity, StoredCertificates())

    @property
    def authorities(self) -> Sequence[x509.Certificate]:
        return self._now.authorities

    @property
    def digest(self) -> str:
        return self._now.stored.digest

    def client_certificate(self) -> ClientCertificate | None:
        """For a connection to another process; None without a certificate."""
        return self._now.client

    def client_context(self) -> ssl.SSLContext | None:
        """That certificate as a TLS context."""
        held = self._now.client
        return held.context if held else None

    def is_due(self, digest: str, now: datetime | None = None) -> bool:
        """Whether to ask for a certificate: the console has other authorities, or ours is ageing."""
        held = self._now
        return digest != held.stored.digest or (
            held.renew_at is not None and (now or datetime.now(UTC)) >= held.renew_at
        )

    def accept(self, certificate: str, authorities: str, digest: str) -> None:
        """Show this certificate and believe these authorities from the next handshake on.

        It is on disk before it is used. Raises Unusable, and changes nothing then; OSError.
        """
        stored = StoredCertificates(certificate, authorities, digest)
        made = self._made(stored)
        directory = self.identity.state_dir
        write_durably(directory / CERTIFICATE_FILE, msgspec.json.encode(stored))
        write_durably(directory / AUTHORITIES_FILE, authorities.encode())
        self._now = made

    def _listening(self, mode: ssl.VerifyMode) -> ssl.SSLContext:
        context = _context(ssl.PROTOCOL_TLS_SERVER, self._self_signed, self.identity.key_pem())
        context.verify_mode = mode
        context.num_tickets = 0
        context.sni_callback = self._go_on
        log_undecodable()
        return context

    def _go_on(self, connection: ssl.SSLObject, _name: str | None, _: ssl.SSLContext) -> None:
        connection.context = self._now.server

    def _made(self, stored: StoredCertificates) -> _Credentials:
        key_pem = self.identity.key_pem()
        if not stored.certificate:
            server = _context(ssl.PROTOCOL_TLS_SERVER, self._self_signed, key_pem)
            return _Credentials(stored, server, None, (), None)
        certificate, authorities = (
            read_certificate(stored.certificate),
            read_authorities(stored.authorities),
        )
        try:  # keys, names and dates are read only now
            _check(certificate, authorities, self.identity)
            begins, ends = certificate.not_valid_before_utc, certificate.not_valid_after_utc
        except Unusable:
            raise
        except (UnsupportedAlgorithm, ValueError) as error:
            raise Unusable(f"The certificate can't be read: {error}.") from error
        return _Credentials(
            stored,
            _context(ssl.PROTOCOL_TLS_SERVER, stored.certificate, key_pem, stored.authorities),
            ClientCertificate(stored.certificate, key_pem, stored.authorities),
            authorities,
            begins + (ends - begins) * RENEW_AT,
        )


def _check(
    certificate: x509.Certificate, authorities: Sequence[x509.Certificate], identity: ProcessIdentity
) -> None:
    key = certificate.public_key()
    if not isinstance(key, ec.EllipticCurvePublicKey) or public_pem(key) != identity.public_key_pem:
        raise Unusable("The certificate is for another key.")
    if (peer := peer_of(certificate)) is None or peer.topic != identity.topic:
        raise Unusable(f"The certificate is not for {identity.topic}.")
    if not is_issued_by(certificate, authorities):
        raise Unusable("The certificate was not issued by one of the authorities that come with it.")


def _context(protocol: int, certificate: str, key_pem: bytes, authorities: str = "") -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    load_chain(context, certificate, key_pem)
    if authorities:
        context.load_verify_locations(cadata=authorities)
    return context


def load_chain(context: ssl.SSLContext, certificate: str, key_pem: bytes) -> None:
    """`load_cert_chain` from memory."""
    with _named(certificate.encode() + key_pem) as path:
        context.load_cert_chain(path)


@contextlib.contextmanager
def _named(content: bytes) -> Iterator[Path]:
    """It as a file: where there are such, one in memory, which goes with this process; else one that
    only this user can read, and only for as long."""
    descriptor, on_disk = _in_memory(), None
    if descriptor is None:
        descriptor, name = tempfile.mkstemp(suffix=".pem")
        on_disk = Path(name)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            yield on_disk or DESCRIPTORS / str(descriptor)
    finally:
        if on_disk:
            on_disk.unlink()


def _in_memory() -> int | None:
    """A new file; None where there are none, or none that can be named."""
    if not hasattr(os, "memfd_create") or not os.access(DESCRIPTORS, os.R_OK | os.X_OK):
        return None
    try:
        return os.memfd_create("chain")
    except OSError:  # it may be forbidden
        return None


class _Hook:
    """Logs server names (SNI) that are not ASCII. Hands every other error to the hook before it.

    CPython decodes the name before it calls `SSLContext.sni_callback`. If that fails, it refuses the
    handshake with a fatal alert, and reports the error to `sys.unraisablehook`, which prints a
    traceback. The name is a client's to choose, so this is no fault of ours: it is one line of the log.
    """

    def __init__(self, before: Callable[[sys.UnraisableHookArgs], object]) -> None:
        self._before = before

    def __call__(self, unraisable: sys.UnraisableHookArgs, /) -> None:
        error, name = unraisable.exc_value, unraisable.object
        # The callback's own errors name the callback, and those of finalizers an object: never bytes.
        if isinstance(error, UnicodeDecodeError) and isinstance(name, bytes) and error.object == name:
            log.info("Refused a TLS handshake: the server name %r is not ASCII", name)
        else:
            self._before(unraisable)


def log_undecodable() -> None:
    """Log such names as one line, in the whole process. Call it where `sni_callback` is set; calls
    after the first change nothing."""
    if not isinstance(sys.unraisablehook, _Hook):
        sys.unraisablehook = _Hook(sys.unraisablehook)
