"""The output of `make up`: the progress of the start, a summary, then the log lines of all processes."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
from typing import Any, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from console.environment import MANAGE, command
from console.stack.core import Service, State
from telemetry.units import duration

COLOURS = ("cyan", "green", "yellow", "magenta", "blue", "bright_cyan", "bright_green", "bright_magenta")
NAME_WIDTH = 12
CRASH_LOOP_EXITS = 3
PLAIN_WIDTH = 100  # where there is no terminal to ask
QUEUE_MAX = 5_000
CLOSE_SECONDS_MAX = 2.0


class Display:
    """The supervisor's watcher. On a terminal it draws; elsewhere it prints plain lines."""

    def __init__(
        self,
        services: dict[str, str],
        *,
        began: float,
        address: str,
        notes: list[str],
        brain: str = "",
        curl: str = "",
    ) -> None:
        """`services`: versions by the names of services. `brain`: where one serves clients. `curl`: a
        command to try."""
        self.console = SteadyConsole(highlight=False)
        if not self.console.is_terminal:
            self.console.width = PLAIN_WIDTH
        self.printer = Printer(self.console)
        self.began = began
        self.address = address
        self.notes = notes
        self.brain = brain
        self.curl = curl
        self.versions = services
        self.states = dict.fromkeys(services, State.WAITING)
        self.started: dict[str, float] = {}
        self.took: dict[str, float] = {}
        self.stages: list[tuple[str, float]] = []
        self.admin: dict[str, str] | None = None
        self.is_up = False
        self._is_stopping = False
        self._colour = {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(services)}
        self._live: Live | None = None

    def __enter__(self) -> Self:
        if self.console.is_terminal and os.environ.get("TERM") != "dumb":
            self._live = Live(console=self.console, get_renderable=self._progress, transient=True)
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end_live()
        self.printer.close()

    def say(self, sentence: str) -> None:
        self.printer.print(Text(sentence, style="bold"))

    def stage(self, name: str, seconds: float) -> None:
        """A stage of the preparation is complete."""
        self.stages.append((name, seconds))
        if not self._live:
            self.say(f"{name}: {duration(seconds)}")

    def changed(self, service: Service, last_lines: list[str]) -> None:
        name, state, now = service.spec.name, service.state, time.monotonic()
        self.states[name] = state
        if state is State.STARTING:
            self.started[name] = now
        elif state in (State.READY, State.DONE) and name not in self.took:
            self.took[name] = now - self.started[name]
            if not self._live and not self.is_up:
                self.say(f"{name}: ready after {duration(self.took[name])}")
        elif state is State.READY:
            self._tell(name, "ready again", style="bold")
        elif state is State.BACKING_OFF:
            self._exited(service, last_lines)
        elif state is State.STOPPING and not self._is_stopping:
            self._is_stopping = True
            self.say("Stopping. Press Ctrl-C again to kill slow processes.")
        elif state is State.STOPPED and self.is_up:
            self._tell(name, "stopped", style="bold")

    def line(self, service: str, line: str) -> None:
        """Print a log line of a service; during the start it is only written to the log file."""
        if self.is_up:
            self._tell(service, line)

    def prepared(self, fact: dict[str, Any]) -> None:
        """A fact that `prepare` printed; the first admin's password is shown in the summary."""
        admin = fact.get("admin")
        if isinstance(admin, dict):
            self.admin = {name: str(value) for name, value in admin.items()}
        elif "stage" in fact:
            with contextlib.suppress(KeyError, TypeError, ValueError):
                self.stage(str(fact["stage"]), float(fact["seconds"]))

    def up(self) -> None:
        self.is_up = True
        self._end_live()
        self.printer.print(self._welcome())
        if self.curl:  # outside the panel, so that it can be copied whole
            self.printer.print(Text(self.curl))

    def _exited(self, service: Service, last_lines: list[str]) -> None:
        name = service.spec.name
        self._tell(name, f"exited: {service.reason}; restarting", style="bold red")
        is_crash_loop = service.failures >= CRASH_LOOP_EXITS
        if is_crash_loop:
            self._tell(name, f"crash loop: {service.failures} exits in a row", style="bold red")
        if is_crash_loop or not self.is_up:
            for line in last_lines:
                self._tell(name, line)

    def _tell(self, service: str, line: str, style: str = "") -> None:
        prefix = Text(f"{service:<{NAME_WIDTH}}│ ", style=self._colour.get(service, ""))
        self.printer.print(prefix + Text.from_ansi(line, style=style))

    def _end_live(self) -> None:
        if self._live:
            with contextlib.suppress(OSError):  # of a terminal that is gone
                self._live.stop()
            self._live = None

    def _progress(self) -> RenderableType:
        """The table that is redrawn during the start."""
        table = Table.grid(padding=(0, 2))
        for name, state in self.states.items():
            if name in self.took:
                mark: RenderableType = Text("●", style="green")
                how = Text(f"{duration(self.took[name]):>8}", style="dim")
            elif state is State.STARTING:
                mark = Spinner("dots", style="cyan")
                how = Text(f"{duration(time.monotonic() - self.started[name]):>8}", style="cyan")
            else:
                mark, how = Text("○", style="dim"), Text(state.value, style="dim")
            table.add_row(mark, Text(name), how, Text(self.versions.get(name, ""), style="dim"))
        return table

    def _welcome(self) -> Panel:
        facts = Table.grid(padding=(0, 2))
        facts.add_row("Address", Text(self.address, style="bold underline"))
        if self.admin:
            password = Text(self.admin.get("password", ""), style="bold")
            facts.add_row("Log in as", Text(self.admin.get("username", ""), style="bold"))
            facts.add_row("Password", password + Text("   shown only once", style="dim"))
        else:
            facts.add_row("Log in as", "admin, with the password from the first start")
            facts.add_row("", Text(f"to reset it: {MANAGE} changepassword admin", style="dim"))
        facts.add_row("API", f"{self.address}/api/v1/docs")
        if self.brain:
            facts.add_row("Models", f"http://{self.brain}/v1   OpenAI's API")
            keys = Text("with an API key of an org: ", style="dim")
            facts.add_row("", keys + Text(f"{self.address}/orgs/lighthouse/callers/"))
        facts.add_row("Stop", f"Ctrl-C here, or `{command('down')}`")
        parts: list[RenderableType] = [*(Text(note, style="yellow") for note in self.notes), facts]
        parts += ["", self._timings()]
        return Panel(Group(*parts), title="Tidegate is up", border_style="green", expand=False)

    def _timings(self) -> RenderableType:
        """The total time, and the time of each stage and of the start of each service."""
        total = f"started in {duration(time.monotonic() - self.began)}"
        times = [*self.stages, *self.took.items()]
        each = ", ".join(f"{name} {duration(seconds)}" for name, seconds in times)
        return Text(f"{total}: {each}", style="dim", overflow="fold")


# Printing without ever waiting. A terminal stands still when somebody presses Ctrl-S, a pipe when its
# reader does, and both can vanish. The supervisor must go on: its processes wait for it to read what
# they say.


class SteadyConsole(Console):
    """A console that leaves it to us what a broken pipe means; rich would end the process."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


class Printer:
    """A thread that prints what it is given, in order. What it has no room for is counted and told."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._queue: queue.Queue[RenderableType | None] = queue.Queue(QUEUE_MAX)
        self._lost = 0
        self._thread = threading.Thread(target=self._run, name="printer", daemon=True)
        self._thread.start()

    def print(self, what: RenderableType) -> None:
        if self._lost and not self._queue.full():
            lost, self._lost = self._lost, 0
            self.print(Text(f"({lost} lines are not shown here, but are in the logs)"))
        try:
            self._queue.put_nowait(what)
        except queue.Full:
            self._lost += 1

    def close(self) -> None:
        """Print what is left, if anybody takes it within a moment."""
        with contextlib.suppress(queue.Full):
            self._queue.put(None, timeout=CLOSE_SECONDS_MAX)
            self._thread.join(CLOSE_SECONDS_MAX)

    def _run(self) -> None:
        gone = False
        while (what := self._queue.get()) is not None:
            if gone:
                continue
            try:
                # A log line is the terminal's to wrap, so that it can be copied whole.
                self.console.print(what, soft_wrap=isinstance(what, Text))
            except (OSError, ValueError):  # the terminal is gone, or the pipe is closed
                gone = True
