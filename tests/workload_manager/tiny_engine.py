"""An OpenAI server that computes nothing: what a `command` engine is in tests.

    python -m tests.workload_manager.tiny_engine PORT FOLDER

What it does and sees goes to FOLDER/seen, a line each. Where a request names a file, it waits for that.
With TIDEGATE_DRIVER it has a driver, and stores and loads what it is asked to.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.workload_manager.tiny_driver import TinyDriver

WAIT_SECONDS = 60.0
PAUSE_SECONDS = 0.01


class Tiny(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    folder: Path
    driver: TinyDriver | None = None

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the name of the standard library
        pass

    def do_GET(self) -> None:
        if self.path == "/v1/models" and (self.folder / "deaf").exists():
            time.sleep(WAIT_SECONDS)
        told = {"key": self.headers.get("authorization"), "headers": dict(self.headers)}
        self.answer({"path": self.path, "pid": os.getpid(), **told})

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers.get("content-length", "0"))) or b"{}")
        if self.path == "/v1/crash":
            sys.stderr.write(
                "(EngineCore pid=7) ERROR 11-23 20:44:08 [core.py:7] ValueError: out of cheese\n"
            )
            sys.stderr.write("RuntimeError: Engine failed. See root cause above.\n")
            sys.stderr.flush()
            os._exit(3)
        if self.path == "/v1/driver":
            assert self.driver
            self.answer(self.driver.ask(asked))
        elif asked.get("stream"):
            self.stream(asked)
        else:
            self.wait(asked)
            self.answer({"asked": asked, "headers": dict(self.headers), "path": self.path})

    def answer(self, value: Any) -> None:
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def stream(self, asked: dict[str, Any]) -> None:
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        try:
            for number in range(asked["pieces"]):
                if number == 1:
                    self.wait(asked)
                    if asked.get("breaks"):
                        self.connection.shutdown(socket.SHUT_RDWR)
                        self.close_connection = True
                        return
                piece = f"data: {number}\n\n".encode()
                self.wfile.write(f"{len(piece):x}\r\n".encode() + piece + b"\r\n")
                self.wfile.flush()
            self.wfile.write(b"0\r\n\r\n")
        except OSError:
            self.see("left")
            self.close_connection = True

    def wait(self, asked: dict[str, Any]) -> None:
        """For a file, or until the client is gone."""
        if "until" in asked:
            self.see("waits")
            deadline = time.monotonic() + WAIT_SECONDS
            while not (self.folder / asked["until"]).exists() and time.monotonic() < deadline:
                time.sleep(PAUSE_SECONDS)

    def see(self, what: str) -> None:
        see(self.folder, what)


def see(folder: Path, what: str) -> None:
    with (folder / "seen").open("a") as file:
        file.write(f"{what}\n")


def main() -> None:
    port, Tiny.folder = int(sys.argv[1]), Path(sys.argv[2])
    see(Tiny.folder, f"started {os.getpid()}")
    if (Tiny.folder / "broken").exists():
        sys.exit("OSError: no cheese at all")
    if (Tiny.folder / "slow").exists():
        time.sleep(WAIT_SECONDS)
    driver = None
    if file := os.environ.get("TIDEGATE_DRIVER"):
        from tests.workload_manager.tiny_driver import TinyDriver

        driver = Tiny.driver = TinyDriver(Path(file))
    server = ThreadingHTTPServer(("127.0.0.1", port), Tiny)
    server.daemon_threads = True
    signal.signal(signal.SIGTERM, lambda *_: threading.Thread(target=server.shutdown).start())
    server.serve_forever(0.05)
    if driver:
        driver.close()
    see(Tiny.folder, "ended")


if __name__ == "__main__":
    main()
