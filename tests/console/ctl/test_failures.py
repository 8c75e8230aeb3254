"""What is said, and with which code, where a console is away, broken, or not what it should be."""

from __future__ import annotations

import itertools
import json
import re
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from email.message import Message
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from console.ctl import waits
from console.ctl.failures import Exit, code_of
from tests.console.ctl.peers import Answer, peer
from tests.console.ctl.shelf import Person

Certified = tuple[str, Path]
JSON = {"Content-Type": "application/json"}
ME = b'{"username": "ada", "read_only": true}'


def person_of(home: Path, address: str) -> Person:
    return Person(home, {"TIDEGATE_ADDRESS": address, "TIDEGATE_TOKEN": "tgw_x"})


def problem(status: int, reason: str, **more: object) -> Answer:
    said = {
        "reason": reason,
        "title": "A title",
        "detail": f"{reason} it is.",
        "request_id": "r-7",
        **more,
    }
    return status, {"Content-Type": "application/problem+json"}, json.dumps(said).encode()


@pytest.mark.parametrize(
    ("status", "reason", "code"),
    [
        (400, "MalformedRequest", 4),
        (401, "Unauthenticated", 4),
        (403, "Forbidden", 4),
        (404, "NotFound", 3),
        (409, "BoxCordoned", 4),
        (409, "CannotUndo", 4),
        (409, "Conflict", 4),
        (409, "InProgress", 5),
        (409, "NodeCordoned", 4),
        (409, "OperationRunning", 5),
        (409, "SpineRefusedByRule", 4),
        (409, "StillRunning", 5),
        (409, "WaitingForCapacity", 4),
        (409, "WaitingForDrain", 4),
        (409, "WaitingForRail", 4),
        (412, "StaleVersion", 5),
        (422, "ExceedsOrgQuota", 4),
        (428, "PreconditionRequired", 5),
        (500, "InternalError", 7),
        (503, "Unavailable", 7),
    ],
)
def test_each_problem_has_its_code(tmp_path: Path, status: int, reason: str, code: int) -> None:
    assert code_of(status, reason) == Exit(code)
    with peer(lambda *_: problem(status, reason)) as address:
        done = person_of(tmp_path, address).run("get", "nodes")
    assert done.code == code
    assert f"({reason})" in done.errors
    assert ("request r-7" in done.errors) == (status >= 500)


def test_an_operation_in_the_way_is_named_with_what_to_do(tmp_path: Path) -> None:
    one = "0199d2a4-0000-7000-8000-000000000007"
    status, headers, body = problem(409, "OperationRunning")
    link = {"Link": f'</api/v1/operations/{one}>; rel="related"'}
    with peer(lambda *_: (status, headers | link, body)) as address:
        done = person_of(tmp_path, address).run("drain", "ax-1")
    assert done.code == 5
    assert f"tidegatectl cancel {one}\n" in done.errors
    assert f"tidegatectl wait operation/{one} --for done\n" in done.errors


def test_fields_are_pointed_at_once(tmp_path: Path) -> None:
    errors = [{"pointer": "/body/boxes", "detail": "must be more"}]
    with peer(
        lambda *_: problem(422, "InvalidRequest", detail="/body/boxes: must be more.", errors=errors)
    ) as address:
        done = person_of(tmp_path, address).run("get", "nodes")
    assert done.errors == "tidegatectl: A title (InvalidRequest)\n  /body/boxes: must be more\n"


def test_a_console_that_is_not_there_is_unavailable(tmp_path: Path) -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        done = person_of(tmp_path, f"http://127.0.0.1:{bound.getsockname()[1]}").run("get", "nodes")
    assert done.code == 7
    assert "can't be reached: " in done.errors
    done = person_of(tmp_path, "https://nowhere.invalid").run("whoami")
    assert (done.code, "https://nowhere.invalid can't be reached" in done.errors) == (7, True)


@pytest.mark.parametrize(
    "answer",
    [
        (200, {"Content-Type": "text/html"}, b"<html>\x1b[2J welcome"),
        (502, {}, b"bad gateway"),
        (200, JSON, b'{"items": [1e999]}'),
        (200, JSON, b"[" * 100_000),
        (302, {"Location": "https://elsewhere.example/"}, b""),
        (200, JSON | {"Content-Encoding": "gzip"}, b"no gzip"),
    ],
    ids=["a page", "a proxy", "no number", "too deep", "a redirect", "not what was asked for"],
)
def test_what_is_no_console_is_said_to_be_none(tmp_path: Path, answer: Answer) -> None:
    with peer(lambda *_: answer) as address:
        done = person_of(tmp_path, address).run("get", "nodes")
    assert done.code == 7
    assert "\x1b" not in done.errors
    assert len(done.errors) < 500


@pytest.mark.parametrize("body", [b"{}", b"null", b"[]", b"7", b'{"items": [7]}'])
@pytest.mark.parametrize(
    "words",
    [
        ["get", "nodes"],
        ["get", "node/ax-1"],
        ["get", "orgs"],
        ["get", "silences"],
        ["version"],
        ["login", "{}"],
        ["whoami"],
    ],
)
def test_an_answer_of_another_shape_is_no_traceback(
    tmp_path: Path, words: list[str], body: bytes
) -> None:
    with peer(lambda *_: (200, JSON, body)) as address:
        person = person_of(tmp_path, address)
        done = person.run(*(word.format(address) for word in words), told="tgr_x\n")
    assert done.code in (0, 7), done.errors
    assert len(done.errors) < 300


def test_what_a_console_says_can_not_speak_to_the_terminal(tmp_path: Path) -> None:
    sly = json.dumps({"username": "\x1b[31mada\x9b2J", "read_only": True}).encode()
    with peer(lambda *_: (200, JSON, sly)) as address:
        done = Person(tmp_path).run("login", address, told="tgr_x\n")
    assert "as  [31mada 2J, who may read." in done.output
    series = {"series": [{"labels": {"model": "m\x1b[31m"}, "values": [1]}]}
    with peer(lambda *_: (200, JSON, json.dumps(series).encode())) as address:
        done = person_of(tmp_path, address).run("top", "models")
    assert "m [31m" in done.output


def test_standard_input_is_read_if_the_environment_has_no_token_or_it_is_named(
    tmp_path: Path,
) -> None:
    asked: list[str] = []

    def answer(_: str, __: str, headers: Message) -> Answer:
        asked.append(headers["Authorization"])
        return 200, JSON, ME

    with peer(answer) as address:
        person = person_of(tmp_path, address)
        assert person.run("login", address, told="tgr_y\n").code == 0
        assert person.run("login", address, "--token-file", "-", told="tgr_y\n").code == 0
        del person.variables["TIDEGATE_TOKEN"]
        assert person.run("login", address, told="tgr_z\n").code == 0
    assert asked == ["Bearer tgw_x", "Bearer tgr_y", "Bearer tgr_z"]


def test_a_wait_has_its_bounds(tmp_path: Path) -> None:
    done = Person(tmp_path).run("get", "nodes", "--request-timeout", "400000d")
    assert (done.code, "at most 366 days" in done.errors) == (2, True)


def test_an_answer_that_is_late_is_a_timeout(tmp_path: Path) -> None:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        address = f"http://127.0.0.1:{listening.getsockname()[1]}"
        done = person_of(tmp_path, address).run("get", "nodes", "--request-timeout", "200ms")
    assert (done.code, done.errors) == (6, f"tidegatectl: {address} did not answer within 0.2 s.\n")


def test_an_answer_that_never_ends_is_a_timeout(tmp_path: Path) -> None:
    def piece_by_piece() -> Iterator[bytes]:
        while not ended.wait(0.02):
            yield b" "

    ended = threading.Event()
    with peer(lambda *_: (200, JSON, piece_by_piece())) as address:
        done = person_of(tmp_path, address).run("get", "nodes", "--request-timeout", "200ms")
        ended.set()
    assert (done.code, done.errors) == (6, f"tidegatectl: {address} did not answer within 0.2 s.\n")


def test_an_answer_has_its_bounds(tmp_path: Path) -> None:
    with peer(lambda *_: (200, JSON, itertools.repeat(b" " * (1 << 20)))) as address:
        done = person_of(tmp_path, address).run("get", "nodes")
    assert (done.code, done.errors) == (7, f"tidegatectl: {address} answered with more than 8 MiB.\n")


def test_lines_of_a_log_have_their_bounds(tmp_path: Path) -> None:
    with peer(lambda *_: (200, {}, [b"short\n", *[b"x" * 40_000] * 9, b"\n", b"the last"])) as address:
        done = person_of(tmp_path, address).run("logs", "instance/chat/chat-0")
    first, *parts, last = done.lines
    assert (first, "".join(parts), last) == ("short", "x" * 360_000, "the last")
    assert max(map(len, parts)) < 200_000


@pytest.mark.parametrize("follow", [[], ["-f"]])
def test_a_line_of_dashes_is_an_engine_s_own(tmp_path: Path, follow: list[str]) -> None:
    log = b"starting\n--- a/x.py\n--- done ---\n"
    with peer(lambda *_: (200, {}, log)) as address:
        done = person_of(tmp_path, address).run("logs", "instance/chat/chat-0", *follow)
    assert (done.code, done.output, done.errors) == (0, log.decode(), "")


def test_a_followed_log_that_ends_before_its_instance_is_unavailable(tmp_path: Path) -> None:
    with peer(lambda *_: (200, {}, b"starting\n\n--- tidegate: It is over.\n")) as address:
        done = person_of(tmp_path, address).run("logs", "-f", "instance/chat/chat-0")
    assert (done.code, done.errors) == (7, "tidegatectl: It is over.\n")


def test_what_did_not_answer_is_said_where_nobody_remembers_a_request(tmp_path: Path) -> None:
    said = {
        "route": None,
        "answers": [],
        "unreachable": [{"driver": "", "reason": "It is away."}],
        "silent_brains": [{"brain": "east", "reason": "It does not answer."}],
    }
    with peer(lambda *_: (200, JSON, json.dumps(said).encode())) as address:
        done = person_of(tmp_path, address).run("explain", "r-1", "--org", "acme")
    assert "Brain east did not answer: It does not answer." in done.output
    assert "Driver unknown did not answer: It is away." in done.output
    assert "remembers request r-1" in done.errors


def test_an_explanation_is_not_denied_where_not_all_orgs_were_asked(tmp_path: Path) -> None:
    nothing: dict[str, object] = {"route": None, "answers": [], "unreachable": [], "silent_brains": []}
    orgs = {"items": [{"slug": f"o{number}"} for number in range(51)], "next_cursor": None}

    def answer(method: str, _: str, __: Message) -> Answer:
        return 200, JSON, json.dumps(orgs if method == "GET" else nothing).encode()

    with peer(answer) as address:
        done = person_of(tmp_path, address).run("explain", "r-1")
        one = person_of(tmp_path, address).run("explain", "r-1", "--org", "o7")
    assert (done.code, "Say --org." in done.errors) == (2, True)
    assert (one.code, "No brain and no driver remembers" in one.errors) == (3, True)


def test_a_console_that_asks_for_patience_is_asked_again_by_the_same_key(tmp_path: Path) -> None:
    keys: list[str] = []

    def answer(method: str, path: str, headers: Message) -> Answer:
        if method == "GET":
            return 200, JSON, b'{"id": 7, "state": "firing"}'
        keys.append(headers["Idempotency-Key"])
        if len(keys) < 3:
            status, more, body = problem(503, "Unavailable")
            return status, {**more, "Retry-After": "0"}, body
        return 200, JSON, b"{}"

    with peer(answer) as address:
        done = person_of(tmp_path, address).run("acknowledge", "7")
    assert (done.code, len(keys), len(set(keys))) == (0, 3, 1)


def test_nobody_waits_for_an_hour(tmp_path: Path) -> None:
    status, headers, body = problem(503, "Unavailable")
    with peer(lambda *_: (status, {**headers, "Retry-After": "3600"}, body)) as address:
        assert person_of(tmp_path, address).run("get", "nodes").code == 7


def test_nothing_is_sent_where_any_manifest_has_a_field_that_does_not_exist(tmp_path: Path) -> None:
    asked: list[str] = []

    def answer(method: str, path: str, _: Message) -> Answer:
        asked.append(f"{method} {path}")
        return problem(404, "NotFound")

    told = "kind: org\nslug: one\nname: One\n---\nkind: org\nslug: two\nnmae: Two\n"
    with peer(answer) as address:
        done = person_of(tmp_path, address).run("apply", "-f", "-", told=told)
    assert (done.code, done.output, asked) == (2, "", [])
    assert "a org has no field `nmae`" in done.errors


@pytest.mark.parametrize(("told", "code"), [("---\nkind: org\nslug: acme\nname: New\n", 1), ("", 2)])
def test_it_is_usage_only_where_nothing_was_changed(tmp_path: Path, told: str, code: int) -> None:
    there = {"slug": "acme", "name": "Old", "org": "acme", "path": "rail", "boxes": {"desired": 1}}
    fixed = "kind: session\nname: chat\norg: acme\npath: leaf\n"
    with peer(lambda *_: (200, JSON, json.dumps(there).encode())) as address:
        done = person_of(tmp_path, address).run("apply", "-f", "-", told=fixed + told)
    assert "`path` of session/chat can't be changed" in done.errors
    assert done.code == code


# A console that is away for a moment


def drained(*, away: int) -> Callable[[str, str, Message], Answer]:
    """A console on which a drain takes five looks, before the last of which nobody answers so often."""
    looks = itertools.count()

    def answer(method: str, _: str, __: Message) -> Answer:
        number = -1 if method == "POST" else next(looks)
        if 1 <= number <= away:
            return 502, {}, b"bad gateway"
        done = number > away + 1
        operation = {
            "id": "op-1",
            "sentence": "drain",
            "error": None,
            "done": done,
            "state": "succeeded" if done else "running",
            "progress": {"percent": 10, "message": "moving"},
        }
        return 202 if method == "POST" else 200, JSON, json.dumps(operation).encode()

    return answer


def test_an_operation_is_followed_over_a_moment_without_a_console(tmp_path: Path) -> None:
    with peer(drained(away=2)) as address:
        done = person_of(tmp_path, address).run("drain", "ax-1")
    assert (done.code, done.output) == (0, "node/ax-1 drained\n")


def test_a_console_that_stays_away_is_told_with_how_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waits, "PATIENCE_SECONDS", 0.1)
    with peer(drained(away=1 << 20)) as address:
        done = person_of(tmp_path, address).run("drain", "ax-1")
    assert done.code == 7
    assert "It continues: tidegatectl wait operation/op-1 --for done\n" in done.errors


# Certificates


@pytest.fixture(scope="module")
def certified(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """The address of a console whose certificate is its own authority, and that certificate."""
    folder = tmp_path_factory.mktemp("tls")
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "console")])
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(7)
        .not_valid_before(now - timedelta(hours=1))
        .not_valid_after(now + timedelta(hours=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    pem = folder / "console.pem"
    pem.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    private = folder / "key.pem"
    private.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(pem, private)
    with peer(lambda *_: (200, JSON, ME), tls) as address:
        yield address.replace("127.0.0.1", "localhost"), pem


def test_a_certificate_that_nobody_knows_is_not_trusted(certified: Certified, tmp_path: Path) -> None:
    address, pem = certified
    person = Person(tmp_path)
    done = person.run("login", address, told="tgr_x\n")
    assert done.code == 7
    assert "is not trusted: self-signed certificate." in done.errors
    assert "--ca" in done.errors
    assert person.run("login", address, "--ca", str(pem), told="tgr_x\n").code == 0
    pem_before = pem.read_bytes()
    pem.write_bytes(b"")  # the context has a copy
    assert person.run("whoami").code == 0
    pem.write_bytes(pem_before)


def test_another_name_than_the_certificates_is_not_trusted(
    certified: tuple[str, Path], tmp_path: Path
) -> None:
    address, pem = certified
    elsewhere = address.replace("localhost", "127.0.0.1")
    done = Person(tmp_path).run("login", elsewhere, "--ca", str(pem), told="tgr_x\n")
    assert done.code == 7
    assert "IP address mismatch" in done.errors


def test_what_is_no_authority_is_usage(tmp_path: Path) -> None:
    path = tmp_path / "ca.pem"
    path.write_text("not a certificate")
    done = Person(tmp_path).run("login", "https://console.example", "--ca", str(path), told="tgr_x\n")
    assert done.code == 2
    assert "no certificates in PEM" in done.errors


def test_a_figure_that_is_younger_than_an_hour_was_none_an_hour_ago(tmp_path: Path) -> None:
    figures = [
        {"label": "Refill p99", "unit": "seconds", "value": 3, "past": [None, 2, 3], "yesterday": None},
        {"label": "Evict p99", "unit": "seconds", "value": 3, "past": [2, None, 3], "yesterday": 1},
    ]
    said = {
        "verdict": "All is well.",
        "reported_at": None,
        "figures": figures,
        "fleet": None,
        "sessions": 0,
        "sessions_waiting": 0,
        "alerts": [],
        "operations": [],
    }
    with peer(lambda *_: (200, JSON, json.dumps(said).encode())) as address:
        output = person_of(tmp_path, address).run("top", "--once", "overview").output
    lines = [line for line in output.splitlines() if line.startswith(("Refill p99", "Evict p99"))]
    assert [re.split("  +", line)[2] for line in lines] == ["-", "2 s"]


# A plan that is printed


def test_a_dry_run_says_which_streams_would_go_where_and_what_would_have_to_wait(tmp_path: Path) -> None:
    moved = {"stream": "job7.full.0", "target": "ax-3", "memory_bytes": 1}
    drain = {
        "moves": [moved | {"path": "spine"}],
        "staying": ["job8.full.0 has no room."],
        "waits_for": "A column lacks a fragment.",
    }
    with peer(lambda *_: (200, JSON, json.dumps(drain).encode())) as address:
        done = person_of(tmp_path, address).run("drain", "ax-1", "--dry-run")
    assert done.lines == [
        "node/ax-1 drained (dry run)",
        "  job7.full.0 to ax-3 (spine)",
        "  job8.full.0 has no room.",
        "  A column lacks a fragment.",
    ]
    rails = {"moves": [moved | {"path_before": "spine", "path_after": "rail"}]}
    with peer(lambda *_: (200, JSON, json.dumps(rails).encode())) as address:
        done = person_of(tmp_path, address).run("restore-rails", "session/chat", "--dry-run")
    assert done.lines[1:] == ["  job7.full.0 to ax-3 (rail)"]
