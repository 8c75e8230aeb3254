"""A manager without an engine: the contract of a folder, and nothing else.

    python fake_manager.py run --folder F
    python fake_manager.py spare

What it does beside that is in its specification:

    {"standby": true}       it waits for the cache, until the file `attach` is in its folder
    {"deaf": true}          SIGTERM does nothing
    {"children": 2}         so many processes of its own, one of them in a session of its own
    {"dies": 3}             it ends with this status at once
    {"lines": 1000}         so many lines of log
    {"result": {…}}         of a job: what it makes; {"fails": {…}} is its error; {"waits": true} lasts;
                            {"raw_result": [255, 9]} are nine bytes

It writes one line into `started` at each start, with its number.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import site
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

PAUSE_SECONDS = 0.02
CHILD = "import signal, sys; signal.signal(15, signal.SIG_IGN); sys.stdin.read() or signal.pause()"


class FakeManager:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.spec: dict[str, Any] = json.loads((folder / "spec.json").read_text())
        self.changed = threading.Condition()
        self.status: dict[str, Any] = {"version": 0}
        self.ending = threading.Event()

    def run(self) -> int:
        with (self.folder / "started").open("a") as file:
            file.write(f"{os.getpid()}\n")
        self._make_children()
        for number in range(self.spec.get("lines", 0)):
            print(f"line {number}", flush=True)
        if "dies" in self.spec:
            return int(self.spec["dies"])
        if self.spec.get("deaf"):
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        else:
            signal.signal(signal.SIGTERM, lambda *_: self.ending.set())
        self._say(state="starting")
        self._listen()
        goal = ""
        while not self.ending.is_set():
            goal = self._goal()
            self._follow(goal)
            if goal == "DRAIN":
                break
            self.ending.wait(PAUSE_SECONDS)
        self._say(state="draining", goal=goal or "RUN")
        print("ended", flush=True)
        return 0

    def _follow(self, goal: str) -> None:
        is_waiting = self.spec.get("standby") and not (self.folder / "attach").exists()
        cache = "waiting" if is_waiting else "released" if goal == "RELEASE_CACHE" else "attached"
        state = "standby" if is_waiting else "ready"
        self._say(state=state, cache=cache, goal=goal, url="http://127.0.0.1:1")

    def _goal(self) -> str:
        try:
            return (self.folder / "goal").read_text()
        except FileNotFoundError:
            return "RUN"

    def _say(self, **said: Any) -> None:
        with self.changed:
            if any(self.status.get(name) != value for name, value in said.items()):
                self.status |= said | {"version": self.status["version"] + 1, "since": time.time()}
                self.changed.notify_all()

    def _make_children(self) -> None:
        for number in range(self.spec.get("children", 0)):
            subprocess.Popen(
                [sys.executable, "-S", "-c", CHILD],
                stdin=subprocess.DEVNULL,
                start_new_session=number % 2 == 1,
            )

    def _listen(self) -> None:
        os.chdir(self.folder)
        Path("manager.sock").unlink(missing_ok=True)
        listener = socket.socket(socket.AF_UNIX)
        listener.bind("manager.sock")
        listener.listen()
        threading.Thread(target=self._serve, args=(listener,), daemon=True).start()

    def _serve(self, listener: socket.socket) -> None:
        while True:
            connection, _ = listener.accept()
            threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        with connection:
            line = connection.makefile("rb").readline().decode()
            asked = dict(pair.split("=") for pair in line.split()[1].partition("?")[2].split("&"))
            after = int(asked["after"])
            with self.changed:
                self.changed.wait_for(lambda: self.status["version"] > after, float(asked["wait"]))
                body = json.dumps(self.status).encode()
            head = f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
            with contextlib.suppress(BrokenPipeError):
                connection.sendall(head.encode() + body)


def job(folder: Path) -> int:
    spec = json.loads((folder / "spec.json").read_text())
    with (folder / "started").open("a") as file:
        file.write(f"{os.getpid()}\n")
    print("working", flush=True)
    _write(folder / "progress.json", {"done": 1, "total": 2, "unit": "steps", "seconds": 0.5})
    while spec.get("waits") and not (folder / "go").exists():
        time.sleep(PAUSE_SECONDS)
    if "fails" in spec:
        _write(folder / "error.json", spec["fails"])
        return 1
    if "raw_result" in spec:
        byte, count = spec["raw_result"]
        (folder / "result.json").write_bytes(bytes([byte]) * count)
        return 0
    if "result" not in spec:
        return 3
    _write(folder / "result.json", spec["result"])
    return 0


def _write(path: Path, document: object) -> None:
    fresh = path.with_suffix(".new")
    fresh.write_text(json.dumps(document))
    fresh.rename(path)


def main(arguments: list[str]) -> int:
    if arguments == ["spare"]:
        site.main()
        sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
        from workload_manager import spare

        return spare.wait(main)
    verb, _, folder = arguments
    return FakeManager(Path(folder)).run() if verb == "run" else job(Path(folder))


if __name__ == "__main__":
    # Without waiting for threads that wait for others.
    code = main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(code)
