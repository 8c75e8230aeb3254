"""What a process shows and believes over TLS, and how that changes while connections come."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import socket
import ssl
import stat
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from console.authority.issuing import Root, make_root
from kvss_agent.http.answers import Budget, Fault, Unanswered
from kvss_agent.http.blocking_exchange import BlockingExchange
from kvss_agent.http.exchange import Exchange, run
from kvss_agent.security import trust as trusts
from kvss_agent.security.certificates import Role, key_name, peer_of_connection, process_name
from kvss_agent.security.identity import ProcessIdentity, Unusable, fingerprint
from kvss_agent.security.trust import Trust
from tests.kvss_agent.certificates import NOW, issue, process


@pytest.fixture
def root() -> Root:
    return make_root("one", NOW)


@contextlib.contextmanager
def serving(context: ssl.SSLContext) -> Iterator[int]:
    """Says to each who connects as whom it takes them."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as listener:

        def run() -> None:
            while True:
                try:
                    sock, _ = listener.accept()
                except OSError:
                    return
                with contextlib.suppress(OSError), context.wrap_socket(sock, server_side=True) as tls:
                    peer = peer_of_connection(tls)
                    tls.sendall((peer.topic if peer else "nobody").encode())

        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            thread.join(60)


def taken_as(port: int, context: ssl.SSLContext, name: str) -> str:
    """Empty where the server ends it; raises what the client finds out."""
    with (
        socket.create_connection(("127.0.0.1", port), timeout=60) as sock,
        context.wrap_socket(sock, server_hostname=name) as tls,
        contextlib.suppress(ssl.SSLError, ConnectionError),
    ):
        return tls.recv(1000).decode()
    return ""


def test_both_sides_know_who_the_other_is(tmp_path: Path, root: Root) -> None:
    server = process(tmp_path, Role.NODE, "ax-1", root)
    client = process(tmp_path, Role.DRIVER, "job7", root)
    shown, by_key = client.client_context(), key_name(fingerprint(server.identity.public_key_pem))
    assert shown
    with serving(server.for_data) as port:
        assert taken_as(port, shown, by_key) == "driver:job7"
        assert taken_as(port, shown, "ax-1.node.tidegate.internal") == "driver:job7"
        for other in (
            key_name(fingerprint(client.identity.public_key_pem)),
            "ax-2.node.tidegate.internal",
            "ax-1.driver.tidegate.internal",
            "127.0.0.1",
            "localhost",
        ):
            with pytest.raises(ssl.SSLCertVerificationError):
                taken_as(port, shown, other)


def test_why_a_certificate_is_not_believed_is_said_in_a_sentence(tmp_path: Path, root: Root) -> None:
    another = make_root("another", NOW)

    def asked(server: Trust, client: Trust, name: str = "") -> tuple[Fault, str]:
        shown = client.client_context()
        assert shown
        by_key = name or key_name(fingerprint(server.identity.public_key_pem))

        async def asking(url: str) -> None:
            async with Exchange(shown) as exchange:
                await exchange.ask("GET", url, "token", Budget(30.0), server_name=by_key)

        def blocking(url: str) -> None:
            with contextlib.closing(BlockingExchange(url, shown, by_key)) as exchange:
                exchange.ask("GET", "/", "token", Budget(30.0))

        told = set()
        for ask in (lambda url: run(asking(url)), blocking):
            with serving(server.for_data) as port, pytest.raises(Unanswered) as caught:
                ask(f"https://127.0.0.1:{port}")
            told.add((caught.value.fault, str(caught.value)))
        [both] = told
        return both

    ours = process(tmp_path, Role.CONSOLE, "console", root)
    assert asked(process(tmp_path, Role.NODE, "ax-1", another, root), ours) == (
        Fault.UNTRUSTED,
        "Its certificate is of another authority.",
    )
    theirs = process(tmp_path, Role.NODE, "ax-2", root)
    assert asked(theirs, ours, key_name("0" * 64)) == (
        Fault.UNTRUSTED,
        "Its certificate is of another process: another key than the one that has joined.",
    )


def test_who_is_not_believed_gets_nowhere(tmp_path: Path, root: Root) -> None:
    foreign = make_root("another", NOW)
    server = process(tmp_path, Role.NODE, "ax-1", root)
    name = key_name(fingerprint(server.identity.public_key_pem))
    nobody = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    nobody.load_verify_locations(cadata=root.certificate)
    stranger = process(tmp_path, Role.CONSOLE, "console", foreign, root).client_context()
    expired = ProcessIdentity.load(tmp_path / "old", "driver:old")
    over = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    over.load_verify_locations(cadata=root.certificate)
    ended = issue(root, expired, Role.DRIVER, "old", timedelta(seconds=-1))
    trusts.load_chain(over, ended, expired.key_pem())
    believing_others = process(tmp_path, Role.DRIVER, "b", foreign).client_context()
    assert stranger
    assert believing_others
    with serving(server.for_data) as port:
        for context in (nobody, stranger, over):
            assert taken_as(port, context, name) == ""
        with pytest.raises(ssl.SSLCertVerificationError):
            taken_as(port, believing_others, name)
    with serving(server.for_control) as port:  # where nobody may ask for health
        assert taken_as(port, nobody, name) == "nobody"
        for context in (stranger, over):
            assert taken_as(port, context, name) == ""
    old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    old.maximum_version = ssl.TLSVersion.TLSv1_2
    old.load_verify_locations(cadata=root.certificate)
    with serving(server.for_control) as port, pytest.raises(ssl.SSLError):
        taken_as(port, old, name)


def test_before_it_has_a_certificate_it_believes_nobody(tmp_path: Path, root: Root) -> None:
    new = Trust.load(ProcessIdentity.load(tmp_path / "new", "node:new"))
    assert not new.client_certificate()
    assert new.client_context() is None
    client = process(tmp_path, Role.CONSOLE, "console", root).client_context()
    assert client
    with serving(new.for_control) as port, pytest.raises(ssl.SSLCertVerificationError):
        taken_as(port, client, key_name(fingerprint(new.identity.public_key_pem)))
    trusting = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    trusting.check_hostname, trusting.verify_mode = False, ssl.CERT_NONE
    with serving(new.for_control) as port:
        assert taken_as(port, trusting, "x") == "nobody"
    with serving(new.for_data) as port:
        assert taken_as(port, trusting, "x") == ""


def test_certificates_and_roots_change_under_connections_without_one_that_fails(
    tmp_path: Path, root: Root
) -> None:
    """A root is replaced as the console does it, while clients connect all the time."""
    server = process(tmp_path, Role.NODE, "ax-1", root)
    client = process(tmp_path, Role.DRIVER, "job7", root)
    name = key_name(fingerprint(server.identity.public_key_pem))
    following = make_root("two", NOW)
    failed: list[str] = []
    served, ends, enough = Counter[int](), threading.Event(), threading.Condition()

    with serving(server.for_data) as port:

        def load(number: int) -> None:
            while not ends.is_set():
                context = client.client_context()
                assert context
                try:
                    said = taken_as(port, context, name)
                except OSError as error:
                    said = repr(error)
                if said != "driver:job7":
                    failed.append(said)
                with enough:
                    served[number] += 1
                    enough.notify_all()

        def some_more() -> None:
            """By each: whoever still shows what it had before a change has connected with it."""
            with enough:
                before = served.copy()
                assert enough.wait_for(
                    lambda: all(served[one] >= before[one] + 6 for one in range(3)), 60
                )

        threads = [threading.Thread(target=load, args=(number,)) for number in range(3)]
        for thread in threads:
            thread.start()
        both = root.certificate + following.certificate
        steps = [(root, both), (following, both), (following, following.certificate)]
        some_more()
        for signing, believed in steps:
            for one, role, called in ((server, Role.NODE, "ax-1"), (client, Role.DRIVER, "job7")):
                issued = issue(signing, one.identity, role, called)
                one.accept(issued, believed, signing.fingerprint + believed[:20])
                some_more()
        ends.set()
        for thread in threads:
            thread.join(60)
        assert failed == []
        former = process(tmp_path, Role.DRIVER, "late", root, following).client_context()
        assert former
        assert taken_as(port, former, name) == "", "the former root is believed no more"


def test_what_was_issued_is_kept_for_the_next_life(tmp_path: Path, root: Root) -> None:
    first = process(tmp_path, Role.NODE, "ax-1", root)
    again = Trust.load(ProcessIdentity.load(tmp_path / "ax-1", "node:ax-1"))
    assert again.digest == first.digest == root.fingerprint
    assert again.client_context()
    kept = tmp_path / "ax-1" / trusts.CERTIFICATE_FILE
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600
    assert (tmp_path / "ax-1" / trusts.AUTHORITIES_FILE).read_text() == root.certificate
    for torn in (b"", b"{}", b"nonsense", kept.read_bytes()[:-20], json.dumps({"certificate": "x"})):
        kept.write_bytes(torn if isinstance(torn, bytes) else torn.encode())
        new = Trust.load(ProcessIdentity.load(tmp_path / "ax-1", "node:ax-1"))
        assert not new.client_certificate()
        assert new.is_due(root.fingerprint)


def test_a_certificate_that_is_not_ours_changes_nothing(tmp_path: Path, root: Root) -> None:
    ours = process(tmp_path, Role.NODE, "ax-1", root)
    other = ProcessIdentity.load(tmp_path / "b", "node:ax-2")
    foreign = make_root("another", NOW)
    before = ours.client_context()
    for certificate, authorities, said in (
        (issue(root, other, Role.NODE, "ax-1"), root.certificate, "another key"),
        (issue(root, ours.identity, Role.NODE, "ax-2"), root.certificate, "not for node:ax-1"),
        (issue(root, ours.identity, Role.CONSOLE, "ax-1"), root.certificate, "not for node:ax-1"),
        (issue(foreign, ours.identity, Role.NODE, "ax-1"), root.certificate, "not issued"),
        ("nonsense", root.certificate, "not a PEM certificate"),
        (issue(root, ours.identity, Role.NODE, "ax-1"), "", "not a PEM bundle"),
        (issue(root, ours.identity, Role.NODE, "ax-1"), root.certificate * 9, "1 to 8"),
    ):
        with pytest.raises(Unusable, match=said):
            ours.accept(certificate, authorities, "d")
    assert ours.client_context() is before
    assert ours.digest == root.fingerprint


def test_a_certificate_with_a_wrong_byte_is_requested_anew(tmp_path: Path, root: Root) -> None:
    ours = process(tmp_path, Role.NODE, "ax-1", root)
    kept = tmp_path / "ax-1" / trusts.CERTIFICATE_FILE
    stored = json.loads(kept.read_text())
    der = ssl.PEM_cert_to_DER_cert(stored["certificate"])
    for at in range(len(der)):
        damaged = der[:at] + bytes([der[at] ^ 0x10]) + der[at + 1 :]
        kept.write_text(json.dumps({**stored, "certificate": ssl.DER_cert_to_PEM_cert(damaged)}))
        assert not Trust.load(ours.identity).client_certificate(), at


def test_it_is_renewed_after_two_thirds_of_its_life_or_when_authorities_change(
    tmp_path: Path, root: Root
) -> None:
    ours = process(tmp_path, Role.NODE, "ax-1", root)
    assert not ours.is_due(root.fingerprint)
    assert not ours.is_due(root.fingerprint, NOW + timedelta(days=4.5))
    assert ours.is_due(root.fingerprint, NOW + timedelta(days=4.8))
    assert ours.is_due("another")


@pytest.mark.parametrize("name", ["a_b", "a..b", "-", "a.", "ax-1.rack", "x" * 63])
def test_names_that_make_no_host_name_still_make_certificates(
    tmp_path: Path, root: Root, name: str
) -> None:
    made = process(tmp_path, Role.NODE, name, root)
    assert made.client_certificate()
    by_name = process_name(Role.NODE, name)
    assert by_name is None or by_name.endswith(".node.tidegate.internal")


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="this system has no files in memory")
def test_a_key_is_in_no_file_that_a_crash_would_leave(
    tmp_path: Path, root: Root, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "nowhere"))
    assert process(tmp_path, Role.NODE, "ax-1", root).client_certificate()


@pytest.mark.parametrize("what", ["memfd_create", "names"])
def test_where_there_are_no_files_in_memory_it_is_in_one_for_a_moment(
    tmp_path: Path, root: Root, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    if what == "memfd_create":
        monkeypatch.delattr(os, what, raising=False)
    else:  # without /proc they can't be named
        monkeypatch.setattr(trusts, "DESCRIPTORS", tmp_path / "nowhere")
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    assert process(tmp_path, Role.NODE, "ax-1", root).client_certificate()
    assert list((tmp_path / "temporary").iterdir()) == []


def handshake(server: ssl.SSLContext, name: str, *, patched: bytes) -> None:
    """A client's first message with this server name, of which the first letters are replaced. Python's
    own client refuses to send a name that is not ASCII. Raises what the server raises."""
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    sent, received = ssl.MemoryBIO(), ssl.MemoryBIO()
    with pytest.raises(ssl.SSLWantReadError):
        client.wrap_bio(received, sent, server_hostname=name).do_handshake()
    hello = sent.read()
    assert hello.count(name.encode()) == 1
    incoming = ssl.MemoryBIO()
    incoming.write(hello.replace(name.encode(), patched + name[len(patched) :].encode()))
    server.wrap_bio(incoming, ssl.MemoryBIO(), server_side=True).do_handshake()


def test_a_server_name_that_is_not_ascii_is_refused_with_one_line(
    tmp_path: Path, root: Root, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    shown: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: shown.append(unraisable.exc_type))
    server = process(tmp_path, Role.NODE, "ax-1", root)
    caplog.set_level("INFO")
    for context in (server.for_control, server.for_data):
        caplog.clear()
        with pytest.raises(ssl.SSLWantReadError):  # a usual name: the handshake goes on
            handshake(context, "agent.internal", patched=b"a")
        assert not caplog.records
        with pytest.raises(ssl.SSLError, match="CALLBACK_FAILED"):
            handshake(context, "agent.internal", patched=b"\xff")
        [record] = caplog.records
        assert record.getMessage().startswith("Refused a TLS handshake")
        assert not record.exc_info
    assert not shown


def test_other_errors_that_nobody_can_catch_are_shown_as_before(
    tmp_path: Path, root: Root, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: shown.append(unraisable.exc_type))
    process(tmp_path, Role.NODE, "ax-1", root)

    class Broken:
        def __del__(self) -> None:
            b"\xff".decode("ascii")

    Broken()
    gc.collect()
    assert shown == [UnicodeDecodeError]
