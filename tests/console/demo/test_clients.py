"""What the demo's log says of its clients."""

from __future__ import annotations

import logging
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest

from console.demo import places, story
from console.demo.clients import Clients

REMOVED, SERVED = "lighthouse", "foundry"


class Brain(BaseHTTPRequestHandler):
    """Accepts each key but that of an org, until it does."""

    accepts_all = False

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        is_removed = self.headers["Authorization"] == f"Bearer {REMOVED}"
        self.send_response(401 if is_removed and not self.accepts_all else 200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Not to the output."""


def test_that_an_orgs_key_is_gone_is_said_once_with_what_to_do(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    places.folder(tmp_path).mkdir(parents=True)
    for org in (REMOVED, SERVED):
        places.caller_token(tmp_path, org).write_text(org)
    asks = [story.Ask(0, org, story.CODING, [1], [2]) for org in (REMOVED, SERVED)]
    with ThreadingHTTPServer(("127.0.0.1", 0), Brain) as server, httpx.Client() as client:
        threading.Thread(target=server.serve_forever).start()
        address = f"http://127.0.0.1:{server.server_port}"
        clients = Clients(story.CODING, tmp_path, lambda: address, threading.Event())

        def ask() -> list[str]:
            caplog.clear()
            for _ in range(3):
                for one in asks:
                    clients._places.acquire()
                    clients._ask(client, address, one)
            return [one.getMessage() for one in caplog.records if one.name == "console.demo.clients"]

        try:
            told = ask()
            Brain.accepts_all = True
            told_again = ask()
        finally:
            server.shutdown()
    rejected, served = told
    assert rejected.startswith(
        "Requests of lighthouse for demo-code are rejected (401): its API key in "
    )
    assert "Start the demo again to create another" in rejected
    assert served == f"demo-code is served at {address}"
    assert told_again == ["The API key of lighthouse is valid again for demo-code"]
