"""What a person sees: how the start goes, where it is, and then what everything says."""

from __future__ import annotations

import os
import time
from typing import Any, Self

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from console.stack.core import State

COLOURS = ("cyan", "green", "yellow", "magenta", "blue", "bright_cyan", "bright_green", "bright_magenta")
NAME_WIDTH = 9
CRASHES_BEFORE_SAYING_SO = 3


class Display:
    """The supervisor's watcher. On a terminal it draws; elsewhere it prints plain lines."""

    def __init__(self, services: list[str], *, began: float, notes: list[str]) -> None:
        self.console = Console(highlight=False, soft_wrap=True)
        self.began = began
        self.address = ""
        self.notes = notes
        self.versions: dict[str, str] = {}
        self.states = dict.fromkeys(services, State.WAITING)
        self.started: dict[str, float] = {}
        self.took: dict[str, float] = {}
        self.stages: list[tuple[str, float]] = []
        self.admin: dict[str, str] | None = None
        self.deaths: dict[str, int] = {}
        self.is_up = False
        self._colour = {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(services)}
        self._live: Live | None = None

    def __enter__(self) -> Self:
        if self.console.is_terminal and os.environ.get("TERM") != "dumb":
            self._live = Live(console=self.console, get_renderable=self._progress, transient=True)
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end_live()

    def stage(self, name: str, seconds: float) -> None:
        """Something that had to be done first is done."""
        self.stages.append((name, seconds))
        if not self._live:
            self.console.print(f"{name}: {seconds:.2f} s")

    def changed(self, service: str, state: State, reason: str) -> None:
        now = time.monotonic()
        self.states[service] = state
        if state is State.STARTING:
            self.started[service] = now
        if state in (State.READY, State.DONE) and service not in self.took:
            self.took[service] = now - self.started[service]
            if not self._live and not self.is_up:
                self.console.print(f"{service}: ready after {self.took[service]:.2f} s")
                return
        if state is State.BACKING_OFF:
            self.deaths[service] = self.deaths.get(service, 0) + 1
            often = self.deaths[service] >= CRASHES_BEFORE_SAYING_SO
            again = f" ({self.deaths[service]} times so far: see its log)" if often else ""
            self._say(service, f"died: {reason}. It is started again.{again}", style="bold red")
        elif self.is_up and state in (State.READY, State.STOPPED):
            self._say(service, "ready again" if state is State.READY else "stopped", style="bold")

    def line(self, service: str, line: str) -> None:
        if self.is_up or self.states[service] in (State.BACKING_OFF, State.FAILED):
            self._say(service, line)

    def prepared(self, fact: dict[str, Any]) -> None:
        if "admin" in fact:
            self.admin = fact["admin"]
        elif "stage" in fact:
            self.stage(f"prepare: {fact['stage']}", float(fact["seconds"]))

    def up(self) -> None:
        self.is_up = True
        self._end_live()
        self.console.print(self._welcome())

    def _say(self, service: str, line: str, style: str = "") -> None:
        prefix = Text(f"{service:<{NAME_WIDTH}}│ ", style=self._colour.get(service, ""))
        self.console.print(prefix + Text.from_ansi(line, style=style))

    def _end_live(self) -> None:
        if self._live:
            self._live.stop()
            self._live = None

    def _progress(self) -> Table:
        table = Table.grid(padding=(0, 2))
        for name, state in self.states.items():
            if name in self.took:
                mark: Any = Text("●", style="green")
                how = Text(f"{self.took[name]:5.2f} s", style="dim")
            elif state is State.STARTING:
                mark = Spinner("dots", style="cyan")
                how = Text(f"{time.monotonic() - self.started[name]:5.1f} s", style="cyan")
            else:
                mark, how = Text("○", style="dim"), Text(state.value, style="dim")
            table.add_row(mark, Text(name), how, Text(self.versions.get(name, ""), style="dim"))
        return table

    def _welcome(self) -> Panel:
        facts = Table.grid(padding=(0, 2))
        facts.add_row("Address", Text(self.address, style="bold underline"))
        if self.admin:
            password = Text(self.admin["password"], style="bold")
            facts.add_row("Log in as", Text(self.admin["username"], style="bold"))
            facts.add_row("Password", password + Text("   shown this once", style="dim"))
        else:
            facts.add_row("Log in as", "admin, with the password of the first start")
            facts.add_row("", Text("forgotten? python manage.py changepassword admin", style="dim"))
        facts.add_row("API", f"{self.address}/api/v1/docs")
        facts.add_row("Stop", "Ctrl-C here, or `make down`")
        times = "  ".join(
            f"{name} {seconds:.1f}" for name, seconds in [*self.stages, *self.took.items()]
        )
        total = time.monotonic() - self.began
        parts: list[Any] = [*(Text(note, style="yellow") for note in self.notes), facts]
        parts += ["", Text(f"{total:.1f} s in all: {times}", style="dim")]
        return Panel(Group(*parts), title="Tidegate is up", border_style="green", expand=False)
