"""An engine that asks a driver of a console's fleet, while authorities are replaced under it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from console.authority.issuing import Root, make_root
from kvss_agent.security.certificates import Role
from kvss_agent.security.trust import AUTHORITIES_FILE, Trust
from swdriver_shim.adapters.objects_config import Misconfigured, open_objects
from swdriver_shim.adapters.remote import ExpectedDriver, RemotePrefixes
from swdriver_shim.desired import GroupSpec, ModelSpec
from tests.kvss_agent.certificates import NOW, issue, process

MODEL = ModelSpec("llama", (GroupSpec("full", (64,)),))


class Answering(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        body = b'{"tokens": 64, "asked": 64}'
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.send_header("connection", "close")  # so that each request shakes hands anew
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def root() -> Root:
    return make_root("one", NOW)


@pytest.fixture
def trust(tmp_path: Path, root: Root) -> Trust:
    return process(tmp_path, Role.DRIVER, "job7", root)


@pytest.fixture
def url(trust: Trust) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Answering)
    server.socket = trust.for_control.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"https://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join(60)
        server.server_close()


def test_a_root_is_replaced_without_a_request_that_fails(
    trust: Trust, url: str, root: Root, tmp_path: Path
) -> None:
    following = make_root("two", NOW)
    expected = ExpectedDriver(tmp_path / "job7" / AUTHORITIES_FILE, "job7")
    engine = RemotePrefixes(url, "t" * 40, MODEL, expected=expected)
    both = root.certificate + following.certificate
    assert engine.query([1] * 64) == 64
    for signing, believed in (
        (root, both),
        (following, both),
        (following, following.certificate),
    ):
        issued = issue(signing, trust.identity, Role.DRIVER, "job7")
        trust.accept(issued, believed, "d")
        assert (engine.query([1] * 64), engine.lost_because) == (64, None)
    engine.close()


def test_another_driver_at_its_address_is_a_miss_that_says_why(trust: Trust, url: str) -> None:
    expected = ExpectedDriver(trust.identity.state_dir / AUTHORITIES_FILE, "job8")
    engine = RemotePrefixes(url, "t" * 40, MODEL, expected=expected)
    assert engine.query([1] * 64) == 0
    assert "of another process" in (engine.lost_because or "")
    unbelieved = RemotePrefixes(url, "t" * 40, MODEL)
    assert unbelieved.query([1] * 64) == 0
    assert "of another authority" in (unbelieved.lost_because or "")


def test_a_configuration_that_can_not_work_is_said(tmp_path: Path, url: str) -> None:
    (tmp_path / "token").write_text("t" * 40)
    given = {"url": url, "token_file": str(tmp_path / "token")}
    for driver, authorities, said in (
        ("job7", "/nowhere", "can't be verified"),
        ("a..b", "/nowhere", "can't be verified"),
        ("job7", str(tmp_path / "token"), "can't be verified"),
        ("job7", "", "Configure the driver"),
    ):
        with pytest.raises(Misconfigured, match=said):
            open_objects({**given, "driver": driver, "authorities": authorities})
