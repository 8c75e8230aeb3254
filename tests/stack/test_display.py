"""What a person sees of the start, of a death, and of what keeps dying."""

from __future__ import annotations

import io
import re
import time

from console.stack.core import Service, Spec, State
from console.stack.display import Display, Printer, SteadyConsole


class Shown:
    """A display without a terminal, and what it has printed."""

    def __init__(self) -> None:
        self.file = io.StringIO()
        services = {"postgres": "PostgreSQL 18.1", "web": ""}
        self.display = Display(
            services, began=time.monotonic(), address="http://127.0.0.1:8400", notes=["A note."]
        )
        self.display.printer.close()
        self.display.console = SteadyConsole(file=self.file, width=100, highlight=False)
        self.display.printer = Printer(self.display.console)

    def enters(self, name: str, state: State, *last_lines: str, failures: int = 0) -> None:
        service = Service(Spec(name), state, failures=failures, reason="exit code 3")
        self.display.changed(service, list(last_lines))

    def comes_up(self) -> None:
        for name in ("postgres", "web"):
            self.enters(name, State.STARTING)
            self.enters(name, State.READY)
        self.display.up()

    @property
    def text(self) -> str:
        self.display.printer.close()
        return self.file.getvalue()


def test_the_panel_has_all_that_a_newcomer_needs() -> None:
    shown = Shown()
    shown.display.prepared({"stage": "migrate", "seconds": 0.41})
    shown.display.prepared({"admin": {"username": "admin", "password": "[red]secret"}})
    shown.comes_up()
    for expected in (
        "http://127.0.0.1:8400",
        "Log in as  admin",
        "[red]secret   shown only once",
        "A note.",
        "migrate 410 ms",
        "Ctrl-C here, or `make down`",
    ):
        assert expected in shown.text, expected


def test_a_command_to_try_can_be_copied_whole() -> None:
    shown = Shown()
    shown.display.curl = command = "curl http://127.0.0.1:8440/v1/models " + "--header x " * 20
    shown.comes_up()
    assert command in shown.text


def test_a_later_start_has_no_password_but_a_way_to_a_new_one() -> None:
    shown = Shown()
    shown.comes_up()
    assert "with the password from the first start" in shown.text
    assert "changepassword admin" in shown.text


def test_lines_carry_the_name_of_who_said_them_and_are_not_markup() -> None:
    shown = Shown()
    shown.comes_up()
    shown.display.line("web", "[bold]GET[/bold] / " + "x" * 200)
    assert f"web         │ [bold]GET[/bold] / {'x' * 200}\n" in shown.text


def test_during_the_start_only_stages_are_shown() -> None:
    shown = Shown()
    shown.enters("postgres", State.STARTING)
    shown.display.line("postgres", "chatter")
    shown.enters("postgres", State.READY)
    assert "chatter" not in shown.text
    assert re.search(r"postgres: ready after [\d.]+ (µs|ms|s)\n", shown.text)


def test_a_death_during_the_start_shows_its_last_words() -> None:
    shown = Shown()
    shown.enters("web", State.STARTING)
    shown.enters("web", State.BACKING_OFF, "ImportError: no such thing", failures=1)
    assert "web         │ exited: exit code 3; restarting" in shown.text
    assert "web         │ ImportError: no such thing" in shown.text


def test_later_a_death_shows_its_last_words_when_it_keeps_happening() -> None:
    shown = Shown()
    shown.comes_up()
    for failures in range(1, 6):
        shown.enters("web", State.BACKING_OFF, f"word {failures}", failures=failures)
    assert "word 2" not in shown.text
    assert "crash loop: 5 exits in a row" in shown.text
    assert "word 5" in shown.text


def test_facts_that_are_none_are_passed_over() -> None:
    shown = Shown()
    for fact in ({}, {"stage": "x"}, {"stage": "x", "seconds": "long"}, {"admin": "nobody"}):
        shown.display.prepared(fact)
    shown.comes_up()
    assert "with the password from the first start" in shown.text
