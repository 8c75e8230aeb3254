"""Workloads, from a manifest to a rollout that is followed. What the orchestrator would write is written
by hand: there is none."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.console.ctl.shelf import Person
from tests.live import LiveConsole, live_console

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

CHAT = """
kind: workload
name: {0}
model: example/{0}
tokens_max: 8192
engine: {{kind: emulator}}
replicas: 2
boxes_per_replica: 0
cache: {{enabled: false}}
rollout: {{deadline_seconds: 10m}}
"""
OBSERVE = """
from console.workloads.models import Condition, Rollout, Workload
from django.utils import timezone
now = timezone.now()
workload = Workload.objects.get(name="{0}")
{1}
"""
DONE = """
workload.rollouts.filter(ended_at=None).update(phase="done", ended_at=now)
Workload.objects.filter(pk=workload.pk).update(
    stable=workload.revision, observed_generation=workload.generation)
Condition.objects.update_or_create(workload=workload, type="Ready",
    defaults=dict(status="True", reason="Ready", message="All replicas are ready.", since=now))
"""
BEGUN = """
Rollout.objects.create(workload=workload, to_revision=workload.revision, phase="running",
    reason="", sentence="", switched=1, total=2, started_at=now)
"""


@pytest.fixture(scope="module")
def console(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveConsole]:
    with live_console(tmp_path_factory.mktemp("console")) as console:
        yield console


@pytest.fixture(scope="module")
def person(console: LiveConsole, tmp_path_factory: pytest.TempPathFactory) -> Person:
    person = Person(tmp_path_factory.mktemp("person"))
    person.output_of("login", console.address, told=f"{console.token()}\n")
    return person


def applied(person: Person, manifest: str) -> str:
    """What was done."""
    return person.output_of("apply", "-f", "-", told=manifest).split()[1]


def made(person: Person, name: str) -> str:
    assert applied(person, CHAT.format(name)) == "created"
    return name


def part(name: str, fields: str) -> str:
    return f"kind: workload\nname: {name}\n{fields}\n"


def observed(console: LiveConsole, name: str, what: str) -> None:
    console.manage(OBSERVE.format(name, what))


def test_a_manifest_becomes_a_workload_and_can_be_read_back(person: Person) -> None:
    name = made(person, "chat")
    assert person.run("get", "wl", "--no-headers").lines[0].split()[:5] == [
        name,
        "Unknown",
        "0",
        "2",
        "1",
    ]
    printed = person.output_of("get", "workload", name, "-o", "yaml")
    assert applied(person, printed) == "unchanged"
    assert applied(person, CHAT.format(name)) == "unchanged"


def test_what_a_manifest_names_changes_and_nothing_else(person: Person) -> None:
    name = made(person, "parts")
    patch = part(name, "engine: {arguments: [--x]}")
    differs = person.run("diff", "-f", "-", told=patch)
    assert differs.code == 1
    assert "+  - --x" in differs.output
    dry = person.run("apply", "-f", "-", "--dry-run", told=patch)
    assert dry.lines[0] == f"workload/{name} configured (dry run)"
    assert len(dry.lines) == 2  # with what the console says of the plan
    assert applied(person, patch) == "configured"
    spec = person.run("get", "workload", name, "-o", "json").value["spec"]
    assert (spec["engine"]["kind"], spec["engine"]["arguments"]) == ("emulator", ["--x"])
    wrong = person.run("apply", "-f", "-", told=part(name, "engine: {kind: abacus}"))
    assert wrong.code == 4
    assert "/body/patch/engine/kind" in wrong.errors


def test_a_workload_is_scaled_restarted_and_rolled_back(person: Person) -> None:
    name = made(person, "verbs")
    said = f"workload/{name}"
    assert person.output_of("scale", name, "--replicas", "3") == f"{said} scaled\n"
    assert person.run("scale", name).code == 2
    assert person.output_of("restart", said, "--reason", "a leak") == f"{said} restarted\n"
    assert applied(person, part(name, "tokens_max: 4096")) == "configured"
    history = person.run("rollout", "history", name).lines
    assert [line.split()[1] for line in history] == ["NUMBER", "2", "1"]
    dry = person.run("rollout", "undo", name, "--revision", "1", "--dry-run")
    assert dry.lines[0] == f"{said} rolled back (dry run)"
    changed = [line for line in dry.lines[1:] if line[0] in "+-" and line[:3] not in ("+++", "---")]
    assert changed == ["-tokens_max: 4096", "+tokens_max: 8192"]
    undone = person.output_of("rollout", "undo", name, "--revision", "1")
    assert undone == f"{said} rolled back\n"
    workload = person.run("get", said, "-o", "json").value
    spec = workload["spec"]
    assert (workload["revision"], spec["tokens_max"], spec["replicas"]) == (3, 8192, 3)
    assert person.run("get", f"revision/{name}/3", "-o", "json").value["same_as"] == 1
    person.output_of("rollout", "pause", name)
    assert person.run("wait", said, "--for", "paused=true").code == 0
    person.output_of("rollout", "resume", name)


def test_a_rollout_is_followed_to_its_end(person: Person, console: LiveConsole) -> None:
    name = made(person, "rolled")
    observed(console, name, BEGUN)
    assert "Switched:" in person.output_of("rollout", "status", name, "--no-wait")
    with person.terminal("rollout", "status", name) as terminal:
        terminal.until("50 %")
        observed(console, name, DONE)
        assert f"workload/{name} runs revision 1" in terminal.all()
        assert terminal.process.returncode == 0
    assert person.run("wait", f"workload/{name}", "--for", "Ready").code == 0
    assert person.run("rollout", "status", name).code == 0


def test_a_rollout_that_is_undone_has_failed(person: Person, console: LiveConsole) -> None:
    name = made(person, "undone")
    observed(console, name, DONE)
    assert applied(person, part(name, "tokens_max: 4096")) == "configured"
    observed(console, name, BEGUN)
    with person.process("rollout", "status", name) as process:
        assert process.stderr is not None
        assert process.stderr.readline().startswith(b"50 %")
        why = 'workload.rollouts.update(phase="undone", sentence="Its engines fail.", ended_at=now)'
        observed(console, name, why)
        person.output_of("rollout", "undo", name)
        assert process.wait(60) == 1
        *_, last = process.stderr.read().splitlines()
    assert last == b"tidegatectl: Revision 2 was replaced by revision 3. Its engines fail."
    observed(console, name, BEGUN)
    observed(console, name, DONE)
    late = person.run("rollout", "status", name)
    assert late.code == 1, "who asks when all is over is told so, too"
    assert "Revision 2 was rolled back, and revision 3 runs" in late.errors


def test_a_paused_rollout_is_not_waited_for(person: Person, console: LiveConsole) -> None:
    name = made(person, "paused")
    observed(console, name, BEGUN)
    observed(console, name, 'workload.rollouts.update(phase="paused", sentence="Too slow.")')
    done = person.run("rollout", "status", name)
    assert (done.code, done.errors.splitlines()[-1]) == (
        1,
        "tidegatectl: The rollout is paused: Too slow.",
    )


def test_a_deleted_workload_is_waited_for(person: Person, console: LiveConsole) -> None:
    name = made(person, "gone")
    done = person.run("delete", f"workload/{name}", "--yes", "--timeout", "300ms")
    assert (done.code, "was not deleted within 300 ms" in done.errors) == (6, True)
    again = person.run("delete", f"workload/{name}", "--yes", "--no-wait")
    assert again.code == 5
    end = "from console.workloads.lifecycle import forget, release\nrelease(workload)\nforget(workload)"
    observed(console, name, end)
    assert person.run("wait", f"workload/{name}", "--for", "delete").code == 0
