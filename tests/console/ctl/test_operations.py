"""Work that takes longer than a request: sessions, drains, and what is seen of them meanwhile."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from console.environment import PROJECT
from tests.console.ctl.shelf import Person
from tests.live import LiveConsole, live_console

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

FLEET = """
from console.orgs.models import Org
from tests.console.sessions.fleets import make_fleet
Org.objects.create(slug="acme", name="Acme")
make_fleet(boxes=8, memory_bytes=1 << 40)
"""
SWEEP = """
from django.utils import timezone
from console.operations import services
for operation_id in services.take_due(timezone.now()):
    while services.advance(operation_id): pass
"""
SESSION = "kind: session\nname: {}\norg: acme\nboxes: {}\n"


@pytest.fixture(scope="module")
def console(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveConsole]:
    with live_console(tmp_path_factory.mktemp("console")) as console:
        console.manage(FLEET)
        yield console


@pytest.fixture(scope="module")
def person(console: LiveConsole, tmp_path_factory: pytest.TempPathFactory) -> Person:
    person = Person(tmp_path_factory.mktemp("person"))
    person.output_of("login", console.address, told=f"{console.token()}\n")
    return person


def running(person: Person) -> str:
    [operation] = person.run("get", "operations", "--done", "false", "-o", "json").value
    return str(operation["id"])


def made(person: Person, console: LiveConsole, name: str, boxes: int) -> str:
    person.output_of("apply", "-f", "-", "--no-wait", told=SESSION.format(name, boxes))
    console.manage(SWEEP)
    return name


def test_an_operation_is_followed_to_its_end_with_a_bar(
    person: Person, console: LiveConsole, tmp_path: Path
) -> None:
    path = tmp_path / "session.yaml"
    path.write_text(SESSION.format("followed", 2))
    with person.terminal("apply", "-f", str(path)) as terminal:
        assert "Create session followed with 2 boxes" in terminal.until("0 %")
        console.manage(SWEEP)
        assert "session/followed created" in terminal.all()
        assert terminal.process.returncode == 0
    session = person.run("get", "session", "followed", "-o", "json").value
    assert session["boxes"]["actual"] == 2


def test_nobody_has_to_wait(person: Person, console: LiveConsole) -> None:
    done = person.run("apply", "-f", "-", "--no-wait", told=SESSION.format("later", 1))
    identity = running(person)
    assert done.output == f"session/later started: tidegatectl wait operation/{identity} --for done\n"
    waiting = person.run("wait", f"operation/{identity}", "--for", "done", "--timeout", "300ms")
    assert waiting.code == 6
    console.manage(SWEEP)
    assert person.run("wait", "operation", identity, "--for", "done").code == 0


def test_what_waits_longer_than_it_may_says_how_to_go_on(person: Person, console: LiveConsole) -> None:
    done = person.run("apply", "-f", "-", "--timeout", "300ms", told=SESSION.format("slow", 1))
    assert done.code == 6
    assert f"Operation {running(person)} was not done within 300 ms." in done.errors
    console.manage(SWEEP)


def test_ctrl_c_leaves_the_operation_running(
    person: Person, console: LiveConsole, tmp_path: Path
) -> None:
    path = tmp_path / "session.yaml"
    path.write_text(SESSION.format("left", 1))
    with person.terminal("apply", "-f", str(path)) as terminal:
        terminal.until("0 %")
        assert terminal.interrupt() == 130
        assert "It continues: tidegatectl wait operation/" in terminal.all()
    console.manage(SWEEP)
    assert person.run("get", "session", "left").code == 0


def test_a_session_is_scaled_compared_and_deleted(person: Person, console: LiveConsole) -> None:
    name = made(person, console, "grown", 1)
    done = person.run("scale", f"session/{name}", "--boxes", "2", "--dry-run")
    assert done.lines[0] == f"session/{name} scaled (dry run)"
    differs = person.run("diff", "-f", "-", told=SESSION.format(name, 2))
    assert (differs.code, "+boxes: 2" in differs.lines) == (1, True)
    person.output_of("scale", f"session/{name}", "--boxes", "2", "--no-wait")
    busy = person.run("scale", f"session/{name}", "--boxes", "1", "--no-wait")
    assert busy.code == 5
    assert "(OperationRunning)" in busy.errors
    assert f"tidegatectl cancel {running(person)}\n" in busy.errors
    console.manage(SWEEP)
    assert person.run("diff", "-f", "-", told=SESSION.format(name, 2)).code == 0
    fixed = person.run("apply", "-f", "-", told=f"kind: session\nname: {name}\nboxes: 2\norg: globex\n")
    assert fixed.code == 2
    assert "`org` of session/grown can't be changed: it is 'acme', and not 'globex'." in fixed.errors
    person.output_of("delete", f"session/{name}", "--yes", "--no-wait")
    console.manage(SWEEP)
    assert person.run("wait", f"session/{name}", "--for", "delete").code == 0


def test_what_has_no_room_is_refused_with_its_reason(person: Person) -> None:
    done = person.run("apply", "-f", "-", "--dry-run", told=SESSION.format("huge", 99))
    assert done.code == 4
    assert "(ExceedsClusterCapacity)" in done.errors


def test_what_docs_say_of_a_drain_can_be_done(person: Person, console: LiveConsole) -> None:
    page = (PROJECT / "docs" / "tidegatectl.md").read_text()
    text = page.partition("## Operations")[2].partition("```console\n")[2].partition("```")[0]
    lines = [line.replace("ax-2", "ax2") for line in text.splitlines()]
    dry, drain, *others = [shlex.split(line, comments=True)[2:] for line in lines]
    assert person.output_of(*dry) == "node/ax2 drained (dry run)\n"
    assert "started" in person.output_of(*drain, "--no-wait")
    console.manage(SWEEP)
    shown = [person.output_of(*line) for line in others]
    assert "draining" in shown[0]
    assert shown[1] == "node/ax2 uncordoned\n"
    assert " ready " in person.output_of("get", "node", "ax2")


def test_a_drain_that_is_cancelled_has_failed(person: Person, console: LiveConsole) -> None:
    with person.process("drain", "ax1", "--timeout", "60s") as process:
        assert process.stdout is not None
        assert process.stderr is not None
        while not (found := person.run("get", "operations", "--done", "false", "-o", "name").lines):
            assert process.poll() is None
        assert person.run("cancel", found[0]).output == f"{found[0]} cancelled\n"
        console.manage(SWEEP)
        assert process.wait(60) == 1
        assert b"The operation cancelled" in process.stderr.read()
    person.output_of("uncordon", "ax1")


def test_finished_operations_are_in_a_table(person: Person, console: LiveConsole) -> None:
    name = made(person, console, "listed", 1)
    rows = person.run("get", "ops", "--target", f"session:{name}").lines
    assert rows[0].split()[:4] == ["ID", "KIND", "TARGET", "STATE"]
    assert rows[1].split()[1:5] == ["session.create", f"session:{name}", "succeeded", "100"]
    assert f"session:{name}" in person.output_of("describe", f"session/{name}")
