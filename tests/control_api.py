"""Asking control APIs of real agents and drivers, as the console does: one client for all tests."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path

import httpx

from kvss_agent.security.certificates import Role
from kvss_agent.security.identity import ProcessIdentity, fingerprint
from kvss_agent.security.trust import Trust

NO_CONSOLE = "http://127.0.0.1:9"  # where nobody answers: what was issued before holds


@dataclass(frozen=True)
class Tls:
    """What to show, and the name in the certificate that has to be shown to us."""

    context: ssl.SSLContext
    server_name: str


class Named(httpx.HTTPTransport):
    """Expects one certificate, whatever address it is at."""

    def __init__(self, tls: Tls) -> None:
        super().__init__(verify=tls.context)
        self._name = tls.server_name

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        request.extensions = {**request.extensions, "sni_hostname": self._name}
        return super().handle_request(request)


def control_client(
    place: str, token: str | None = None, tls: Tls | None = None, seconds: float = 30
) -> httpx.Client:
    """For the control API at HOST:PORT."""
    return httpx.Client(
        base_url=f"{'https' if tls else 'http'}://{place}",
        headers={"authorization": f"Bearer {token}"} if token else {},
        timeout=seconds,
        transport=Named(tls) if tls else None,
    )


def certified(state_dir: Path, role: Role, name: str) -> ProcessIdentity:
    """Give a process that is to be started in this state directory a certificate of this database's
    authority, as if it had joined."""
    from console.authority import services

    state_dir.mkdir(parents=True, exist_ok=True)
    identity = ProcessIdentity.load(state_dir, f"{role}:{name}")
    issued = services.issue(role, name, identity.public_key_pem)
    told = issued.bundle
    Trust.load(identity).accept(issued.certificate, told.authorities, told.digest)
    return identity


def as_console(identity: ProcessIdentity) -> Tls:
    """To ask this process as the console."""
    from console.authority import client

    return Tls(client.context(), client.server_name(identity.public_key_pem))


def as_process(us: Trust, them: str) -> Tls:
    """To ask the process with this public key as another process."""
    from kvss_agent.security.certificates import key_name

    context = us.client_context()
    assert context
    return Tls(context, key_name(fingerprint(them)))
