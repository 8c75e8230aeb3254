"""Processes with certificates."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

from console.authority.issuing import Root, Signer
from kvss_agent.security.certificates import Peer, Role
from kvss_agent.security.identity import ProcessIdentity, fingerprint
from kvss_agent.security.trust import Trust

NOW = datetime.now(UTC)


def issue(
    root: Root, identity: ProcessIdentity, role: Role, name: str, life: timedelta = timedelta(days=7)
) -> str:
    peer = Peer(role, name, fingerprint(identity.public_key_pem))
    return Signer(root.certificate, root.key).issue(peer, identity.public_key_pem, life, NOW)


def process(directory: Path, role: Role, name: str, *roots: Root) -> Trust:
    """One that has a certificate of the first and believes all."""
    made = Trust.load(ProcessIdentity.load(directory / name, f"{role}:{name}"))
    believed = "".join(root.certificate for root in roots)
    made.accept(issue(roots[0], made.identity, role, name), believed, roots[0].fingerprint)
    return made
