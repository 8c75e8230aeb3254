"""What a capability says is what it allows: nothing in it can be changed, and it ends."""

from __future__ import annotations

import base64
from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec
import pytest
from cryptography import x509

from console.authority.issuing import Signer, make_root
from kvss_agent.security.capabilities import (
    CONTEXT,
    LIFE_SECONDS_MAX,
    PREFIX,
    Capability,
    NotAllowed,
    is_one,
    issue,
    read,
)
from kvss_agent.security.identity import ProcessIdentity

NOW = datetime.now(UTC)
ROOT = make_root("one", NOW)
SIGNER = Signer(ROOT.certificate, ROOT.key)
OTHER = make_root("another", NOW)
BELIEVED = [x509.load_pem_x509_certificate(ROOT.certificate.encode())]
MOVE = Capability(
    audience="node:ax-2",
    holder="driver:job7",
    holder_key="a" * 64,
    shard="job7.full.0",
    source="unix:/ax-1/data.sock",
    source_shard="job7.full.0",
    slots=100,
    expires_at=int(NOW.timestamp()) + 600,
)


def test_it_is_read_as_it_was_issued_and_is_the_same_text_each_time() -> None:
    text = issue(MOVE, SIGNER.sign)
    assert is_one(text)
    assert text.isprintable()
    assert read(text, BELIEVED, NOW) == MOVE
    assert issue(MOVE, SIGNER.sign) == text
    assert MOVE.driver == "job7"


def test_it_ends_and_is_never_for_long() -> None:
    text = issue(MOVE, SIGNER.sign)
    with pytest.raises(NotAllowed, match="has expired"):
        read(text, BELIEVED, NOW + timedelta(seconds=601))
    later = msgspec.structs.replace(MOVE, expires_at=int(NOW.timestamp()) + LIFE_SECONDS_MAX + 60)
    with pytest.raises(NotAllowed, match="valid for too long"):
        read(issue(later, SIGNER.sign), BELIEVED, NOW)


def test_nobody_but_an_authority_that_is_believed_makes_one(tmp_path: Path) -> None:
    for sign in (
        Signer(OTHER.certificate, OTHER.key).sign,
        ProcessIdentity.load(tmp_path, "driver:job7").sign,
        lambda payload: SIGNER.sign(payload.removeprefix(CONTEXT)),
        lambda _: b"",
    ):
        with pytest.raises(NotAllowed, match="not signed"):
            read(issue(MOVE, sign), BELIEVED, NOW)
    with pytest.raises(NotAllowed, match="not signed"):
        read(issue(MOVE, SIGNER.sign), [], NOW)


def test_each_byte_counts() -> None:
    text = issue(MOVE, SIGNER.sign)
    for at in range(len(PREFIX), len(text) - 1):  # some bits of the last one say nothing
        other = "A" if text[at] != "A" else "B"
        changed = text[:at] + other + text[at + 1 :]
        with pytest.raises(NotAllowed):
            read(changed, BELIEVED, NOW)


@pytest.mark.parametrize("text", ["tgp_", "tgp_.", "tgp_x", "tgp_é.é", f"tgp_{'x' * 5000}", "tgp_.AAAA"])
def test_nonsense_is_none(text: str) -> None:
    with pytest.raises(NotAllowed):
        read(text, BELIEVED, NOW)


def test_what_an_authority_signs_otherwise_is_none() -> None:
    """The bytes of a certificate, with the signature that they have."""
    certificate = BELIEVED[0]
    content, signature = (
        base64.urlsafe_b64encode(raw).decode().rstrip("=")
        for raw in (certificate.tbs_certificate_bytes, certificate.signature)
    )
    with pytest.raises(NotAllowed):
        read(f"{PREFIX}{content}.{signature}", BELIEVED, NOW)
