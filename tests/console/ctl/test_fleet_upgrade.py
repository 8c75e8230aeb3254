"""`tidegatectl upgrade-fleet`: which node is next, and a fleet that is upgraded by a real console."""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from email.message import Message
from pathlib import Path

import pytest

from console.ctl.arguments import parser
from console.ctl.fleet_upgrade import Fleet, Node, due, elsewhere, left
from tests.console.ctl.peers import Answer, peer
from tests.console.ctl.shelf import Person
from tests.live import LiveConsole, live_console, wait_until

OLD, NEW = "0.1.0", "0.2.0"
SECONDS_MAX = 120.0  # of a machine with other work


def fleet(versions: dict[str, str], *running: str, pages: tuple[str, ...] = ()) -> Fleet:
    nodes = {name: Node(name, version, "ready") for name, version in versions.items()}
    return Fleet(nodes, {name: {"id": name} for name in running}, pages)


def test_nodes_are_begun_with_by_name_and_only_as_many_as_there_is_room_for() -> None:
    whole = {"a": OLD, "b": OLD, "c": NEW, "d": OLD}
    assert due(fleet(whole), NEW, 2, (), rests=False) == ["a", "b"]
    assert due(fleet(whole, "a"), NEW, 2, (), rests=False) == ["b"]
    assert due(fleet(whole, "a", "b"), NEW, 2, (), rests=False) == []
    assert due(fleet(whole, "a", "b", "d"), NEW, 2, (), rests=False) == []
    assert left(fleet(whole), NEW, ()) == ["a", "b", "d"]


def test_an_alert_a_failure_and_the_time_of_observing_hold_it_up() -> None:
    whole = {"a": OLD, "b": OLD}
    assert due(fleet(whole, pages=("leaf-down on leaf-1",)), NEW, 1, (), rests=False) == []
    assert due(fleet(whole), NEW, 1, ("a",), rests=False) == []
    assert due(fleet(whole), NEW, 1, (), rests=True) == []


def test_who_is_lost_is_left_out() -> None:
    one = Fleet({"a": Node("a", OLD, "lost")}, {}, ())
    assert left(one, NEW, ()) == []


def test_an_upgrade_to_another_version_is_named_and_one_to_any_is_followed() -> None:
    running = {
        name: {"id": f"id-{name}", "parameters": {"version": version}}
        for name, version in (("a", "0.1.5"), ("b", NEW), ("c", ""))
    }
    nodes = {name: Node(name, OLD, "maintenance") for name in running}
    assert elsewhere(Fleet(nodes, running, ()), NEW) == {
        "a": "its upgrade to 0.1.5 is running. Cancel it first: `tidegatectl cancel id-a`."
    }


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--version", ""), "It has to be something."),
        (("--version", NEW, "--at-once", "0"), "'0' is not a whole number of 1 or more."),
    ],
)
def test_a_run_that_makes_no_sense_is_usage(
    words: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        parser().parse_args(["upgrade-fleet", *words])
    assert said in capsys.readouterr().err


class Faulty:
    """A console of one node, whose upgrade waits for its software until so many requests have come.
    `away`: the number of a request that nobody answers."""

    def __init__(self, away: int = 0, installed_after: int = 1 << 30) -> None:
        self._away, self._installed_after = away, installed_after
        self._asked = 0
        self._begun = False

    def __call__(self, method: str, path: str, _: Message) -> Answer:
        self._asked += 1
        if self._asked == self._away:
            return 502, {}, b"bad gateway"
        self._begun = self._begun or method == "POST"
        is_installed = self._asked > self._installed_after
        is_running = self._begun and not is_installed
        operation = {
            "id": "op-1",
            "target": "node:a",
            "error": None,
            "parameters": {"version": NEW},
            "state": "running" if is_running else "succeeded",
            "done": not is_running,
            "progress": {"percent": 50, "message": "waits"},
        }
        state = "maintenance" if is_running else "ready"
        version = NEW if is_installed else OLD
        node = {"name": "a", "software_version": version, "state": state, "joined_at": "now"}
        lists = {"nodes": [node], "operations": [operation] if is_running else [], "alerts": []}
        name = path.removeprefix("/api/v1/").partition("?")[0]
        body = {"items": lists[name], "next_cursor": None} if name in lists else operation
        return 202 if method == "POST" else 200, {}, json.dumps(body).encode()


def upgrader(home: Path, address: str) -> Person:
    return Person(home, {"TIDEGATE_ADDRESS": address, "TIDEGATE_TOKEN": "tgw_x"})


@pytest.mark.parametrize("away", [4, 7, 8, 12])  # the first look takes three requests
def test_an_upgrade_goes_on_after_a_moment_without_a_console(tmp_path: Path, away: int) -> None:
    with peer(Faulty(away, installed_after=13)) as address:
        done = upgrader(tmp_path, address).run("upgrade-fleet", "--version", NEW, "--observe", "1ms")
    assert (done.code, done.output) == (0, f"1 nodes run {NEW}.\n"), done.errors


def test_a_command_that_installs_goes_on_after_ctrl_c(tmp_path: Path) -> None:
    begun, goes, done = (tmp_path / name for name in ("begun", "goes", "done"))
    wait = f"touch {begun}; while [ ! -e {goes} ]; do sleep 0.05; done; touch {done}"
    command = ("upgrade-fleet", "--version", NEW, "--run", f"sh -c '{wait}'")
    with peer(Faulty()) as address:
        person = upgrader(tmp_path, address)
        with person.process(*command, start_new_session=True) as process:
            wait_until("it installs", begun.exists)
            os.killpg(process.pid, signal.SIGINT)  # as a terminal does
            assert process.wait(30) == 130
            goes.touch()
            wait_until("it has installed", done.exists)


FLEET = """
from django.utils import timezone
from console.fleet.models import Node
from tests.console.sessions.fleets import make_fleet
make_fleet(boxes=2, memory_bytes=1 << 40)
Node.objects.exclude(name__in=("ax1", "ax2")).delete()
Node.objects.update(software_version="0.1.0", joined_at=timezone.now(), last_heartbeat_at=timezone.now())
"""
SWEEP = """
from django.utils import timezone
from console.operations import services
for operation_id in services.take_due(timezone.now()):
    while services.advance(operation_id): pass
"""
INSTALLED = """
from console.fleet.models import Node
Node.objects.filter(name__in=names).update(software_version="0.2.0")
"""
AGAIN_AND_AGAIN = """
import time
from pathlib import Path
work = compile({work!r}, "work", "exec")
while not Path({there!r}, "over").exists():
    exec(work, {{"names": [path.name for path in Path({folder!r}).iterdir()]}})
    time.sleep(0.1)
"""


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


@contextmanager
def machines(console: LiveConsole, folder: Path, *more: str) -> Iterator[None]:
    """A worker, and agents that run the new version once the operator's command has been there. `more`:
    what else is done again and again."""
    with tempfile.TemporaryDirectory() as there:
        work = "".join((SWEEP, INSTALLED, *more))
        code = AGAIN_AND_AGAIN.format(there=there, folder=str(folder), work=work)
        thread = threading.Thread(target=console.manage, args=(code,))
        thread.start()
        try:
            yield
        finally:
            (Path(there) / "over").touch()
            thread.join()


def versions(person: Person) -> dict[str, tuple[str, str]]:
    rows = person.run("get", "nodes", "-o", "json").value
    return {row["name"]: (row["software_version"], row["state"]) for row in rows}


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_fleet_is_upgraded_goes_on_after_being_killed_and_after_a_failure(
    person: Person, console: LiveConsole, tmp_path: Path
) -> None:
    names = sorted(versions(person))
    command = ("upgrade-fleet", "--version", NEW, "--observe", "100ms")
    dry = person.output_of(*command, "--dry-run")
    assert dry.splitlines() == [f"node/{name} upgraded (dry run)" for name in names]

    # The operator's command fails: the node stays drained, and no other is begun with.
    with machines(console, tmp_path):
        done = person.run(*command, "--run", "false {node}")
    assert (done.code, done.output) == (1, "")
    assert f"{names[0]}: `false {{node}}` ended with 1; the node stays drained." in done.errors
    assert {name for name, (_, state) in versions(person).items() if state != "ready"} == {names[0]}

    # Started again, it takes up that node. Killed in the middle, while it installs on another one, and
    # started again, it ends.
    run = (*command, "--run", f'{sys.executable} -c \'open("{tmp_path}/" + "{{node}}", "w")\'')
    with machines(console, tmp_path), tempfile.TemporaryDirectory() as there:
        holds = Path(there) / "holds"
        holds.touch()
        wait = f"while [ {{node}} != {names[0]} ] && [ -e {holds} ]; do sleep 0.05; done"
        with person.process(*command, "--run", f"sh -c '{wait}; touch {tmp_path}/{{node}}'") as process:
            first = (NEW, "ready")
            wait_until("it is upgraded", lambda: versions(person)[names[0]] == first, SECONDS_MAX)
            process.kill()
            assert process.wait(30) != 0
        holds.unlink()
        done = person.run(*run, "--at-once", "2")
    assert done.code == 0, done.errors
    assert done.output == f"{len(names)} nodes run {NEW}.\n"
    assert set(versions(person).values()) == {(NEW, "ready")}
    assert {path.name for path in tmp_path.iterdir()} == set(names)
    assert person.run(*run).output == f"{len(names)} nodes run {NEW}.\n"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_node_that_is_being_upgraded_to_another_version_is_left_alone(
    person: Person, console: LiveConsole, tmp_path: Path
) -> None:
    """Its operation would wait for that version for a day, whatever was installed."""
    begun = person.run("upgrade", "ax1", "--version", "0.1.5", "--no-wait", "-o", "json").value
    console.manage(SWEEP)
    assert versions(person)["ax1"][1] == "maintenance"
    run = f'{sys.executable} -c \'open("{tmp_path}/" + "{{node}}", "w")\''
    command = ("upgrade-fleet", "--version", NEW, "--observe", "100ms", "--run", run)
    cancel = f"tidegatectl cancel {begun['id']}"
    why = f"tidegatectl: ax1: its upgrade to 0.1.5 is running. Cancel it first: `{cancel}`."
    for done in (person.run(*command), person.run(*command, "--dry-run")):
        assert (done.code, done.output) == (1, "")
        assert done.errors.splitlines()[-1] == f"{why} Run the command again to go on."
    assert not list(tmp_path.iterdir())
    assert {state for name, (_, state) in versions(person).items() if name != "ax1"} == {"ready"}
    person.output_of(*cancel.split()[1:], "--no-wait")
    console.manage(SWEEP)
    assert versions(person)["ax1"][1] == "ready"


REDUNDANT = """
from django.utils import timezone
from console.fleet.models import Node
from console.sessions.fragments import AllFragments
from console.sessions.models import FragmentHolder, Stream
from tests.console.sessions.fleets import make_node
from tests.console.sessions.redundant import DISK, have_been_so_for, report, serve
make_node("home", "l3", software_version="0.2.0")
serve("job1", "home")
Stream.objects.update(code="1+1")
namespace = AllFragments().namespaces["job1"]
for place, name in enumerate(("ax1", "ax2")):
    node = make_node(name, f"l{place}", declared=DISK, software_version="0.1.0")
    FragmentHolder.objects.create(
        namespace=namespace, group="full", index=0, place=place, code="1+1", node=node
    )
have_been_so_for(3600)
report()
report(1204)
"""
REPORTED = """
from pathlib import Path
from console.fleet.models import Node
from tests.console.sessions.redundant import have_been_so_for, report
have_been_so_for(3600)
is_first_done = Node.objects.filter(name="ax1", software_version="0.2.0").exists()
name, other = ("ax2", "ax1") if is_first_done else ("ax1", "ax2")
is_said = f"{{name}}: 0 %: Waits for redundancy" in Path({errors!r}).read_text()
report(0 if is_said else 1204, at=other)
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_no_node_is_drained_while_redundant_columns_could_be_lost_by_that(tmp_path: Path) -> None:
    """Columns lack a fragment before each of the two, until the command says that it waits for that."""
    folder, errors = tmp_path / "installed", tmp_path / "errors"
    folder.mkdir()
    with live_console(tmp_path) as console, errors.open("wb") as told:
        console.manage(REDUNDANT)
        person = Person(tmp_path)
        person.output_of("login", console.address, told=f"{console.token()}\n")
        run = f'{sys.executable} -c \'open("{folder}/" + "{{node}}", "w")\''
        command = ("upgrade-fleet", "--version", NEW, "--observe", "100ms", "--run", run)
        with (
            machines(console, folder, REPORTED.format(errors=str(errors))),
            person.process(*command, stderr=told) as process,
        ):
            output, _ = process.communicate()
        assert (process.returncode, output) == (0, f"3 nodes run {NEW}.\n".encode()), errors.read_text()
    lack = "Waits for redundancy: 1,204 columns of job1.full.0 lack a fragment"
    for name, other in (("ax1", "ax2"), ("ax2", "ax1")):
        why = f"at {other} (not repaired yet), and 1+1 survives the loss of 1 agent."
        assert f"{name}: 0 %: {lack}, {why} Cancel this" in errors.read_text()
    assert {path.name for path in folder.iterdir()} == {"ax1", "ax2"}


def test_a_command_that_there_is_not_is_an_error_of_usage(person: Person) -> None:
    done = person.run("upgrade-fleet")
    assert done.code == 2
    assert "--version" in done.errors
