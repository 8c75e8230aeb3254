"""The key of a process: made once, kept to itself, and what it signs."""

from __future__ import annotations

import base64
import multiprocessing
import stat
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.serialization import Encoding

from kvss_agent.security import identity as identities
from kvss_agent.security.identity import ProcessIdentity, Unusable, fingerprint, requested_key, verify


@pytest.fixture
def ours(tmp_path: Path) -> ProcessIdentity:
    return ProcessIdentity.load(tmp_path / "state", "node:ax-1")


def test_the_key_is_made_once_for_this_user_only(tmp_path: Path) -> None:
    first = ProcessIdentity.load(tmp_path / "state", "node:ax-1")
    again = ProcessIdentity.load(tmp_path / "state", "node:ax-1")
    assert first.public_key_pem == again.public_key_pem
    [file] = list((tmp_path / "state").iterdir())
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert ProcessIdentity.load(tmp_path / "b", "node:ax-1").public_key_pem != first.public_key_pem


def _load(state: str, into: multiprocessing.Queue[str]) -> None:
    into.put(ProcessIdentity.load(Path(state), "node:ax-1").public_key_pem)


def test_processes_that_start_at_once_get_one_key(tmp_path: Path) -> None:
    found: multiprocessing.Queue[str] = multiprocessing.Queue()
    started = [
        multiprocessing.Process(target=_load, args=(str(tmp_path / "state"), found)) for _ in range(4)
    ]
    for one in started:
        one.start()
    assert len({found.get(timeout=60) for _ in started}) == 1
    for one in started:
        one.join(60)


@pytest.mark.parametrize("content", [b"", b"nonsense", b"\xff" * 100])
def test_a_file_that_holds_no_key_is_said_and_not_replaced(tmp_path: Path, content: bytes) -> None:
    (tmp_path / identities.KEY_FILE).write_bytes(content)
    with pytest.raises(Unusable, match="holds no key"):
        ProcessIdentity.load(tmp_path, "node:ax-1")
    assert (tmp_path / identities.KEY_FILE).read_bytes() == content


def test_a_signature_is_for_one_payload_and_one_key(ours: ProcessIdentity, tmp_path: Path) -> None:
    signature = ours.sign(b"purge 7 is done")
    assert signature == ours.sign(b"purge 7 is done")
    assert verify(ours.public_key_pem, b"purge 7 is done", signature)
    assert not verify(ours.public_key_pem, b"purge 8 is done", signature)
    assert not verify(ours.public_key_pem, b"purge 7 is done", signature[:-1])
    assert not verify(ours.public_key_pem, b"purge 7 is done", b"")
    other = ProcessIdentity.load(tmp_path / "other", "node:ax-1")
    assert not verify(other.public_key_pem, b"purge 7 is done", signature)
    for nonsense in ("", "nonsense", "\udc80", ours.public_key_pem[:-40]):
        assert not verify(nonsense, b"purge 7 is done", signature)


def test_what_is_signed_passes_for_nothing_else(ours: ProcessIdentity) -> None:
    """A request that this key has signed is no payload that it has signed, though whoever gets to choose
    what is signed here could try to have one of another kind."""
    request = x509.load_pem_x509_csr(ours.certificate_request().encode())
    assert request.is_signature_valid
    assert not verify(ours.public_key_pem, request.tbs_certrequest_bytes, request.signature)


def test_a_certificate_request_carries_the_key_and_nothing_that_is_believed(
    ours: ProcessIdentity,
) -> None:
    assert requested_key(ours.certificate_request()) == ours.public_key_pem
    assert len(fingerprint(ours.public_key_pem)) == 64


def _request(key: ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey | ed25519.Ed25519PrivateKey) -> str:
    made = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([]))
    algorithm = None if isinstance(key, ed25519.Ed25519PrivateKey) else hashes.SHA256()
    return made.sign(key, algorithm).public_bytes(Encoding.PEM).decode()


def test_other_keys_and_requests_that_prove_nothing_are_refused(ours: ProcessIdentity) -> None:
    for key in (
        ec.generate_private_key(ec.SECP384R1()),
        rsa.generate_private_key(65537, 2048),
        ed25519.Ed25519PrivateKey.generate(),
    ):
        with pytest.raises(Unusable):
            requested_key(_request(key))
    der = x509.load_pem_x509_csr(ours.certificate_request().encode()).public_bytes(Encoding.DER)
    forged = x509.load_der_x509_csr(der[:-1] + bytes([der[-1] ^ 1])).public_bytes(Encoding.PEM)
    with pytest.raises(Unusable, match="not signed"):
        requested_key(forged.decode())
    version = der.index(b"\x02\x01\x00") + 2  # a version that there is none of
    unknown = der[:version] + b"\x07" + der[version + 1 :]
    body = base64.encodebytes(unknown).decode()
    with pytest.raises(Unusable):
        requested_key(f"-----BEGIN CERTIFICATE REQUEST-----\n{body}-----END CERTIFICATE REQUEST-----\n")
    for nonsense in ("", "x" * 5000, "-----BEGIN CERTIFICATE REQUEST-----\n", "\udc80"):
        with pytest.raises(Unusable):
            requested_key(nonsense)


def test_a_state_directory_that_cannot_be_written_is_an_oserror(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        ProcessIdentity.load(tmp_path / "file" / "state", "node:ax-1")
    assert [one.name for one in tmp_path.iterdir()] == ["file"]
