"""Commands before a console that really runs."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from console.ctl import changes, client, writes
from console.ctl.resources import RESOURCES
from tests.console.ctl.shelf import FLEET, Person, furnished, join
from tests.live import LiveConsole, live_console, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

ORG = "kind: org\nslug: {0}\nname: Org {0}\n"
MODEL = """
kind: model
name: chat
model: llama-chat
tokens_max: 8192
---
kind: replica
model: chat
name: chat-0
url: http://127.0.0.1:8000
"""


@pytest.fixture(scope="module")
def console(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveConsole]:
    with live_console(tmp_path_factory.mktemp("console")) as console:
        furnished(console)
        yield console


@pytest.fixture(scope="module")
def token(console: LiveConsole) -> str:
    return console.token()


@pytest.fixture
def person(console: LiveConsole, token: str, tmp_path: Path) -> Person:
    """Somebody who has logged in."""
    person = Person(tmp_path)
    person.output_of("login", console.address, "--name", "here", told=f"{token}\n")
    return person


def org(person: Person, slug: str) -> str:
    person.output_of("apply", "-f", "-", told=ORG.format(slug))
    return slug


# Logging in


def test_a_login_is_stored_for_its_user_alone(person: Person, token: str) -> None:
    path = person.home / "tidegate" / "contexts.json"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert token in path.read_text()
    assert "admin" in person.output_of("whoami")


def test_a_token_that_is_not_accepted_is_not_stored(console: LiveConsole, tmp_path: Path) -> None:
    person = Person(tmp_path)
    done = person.run("login", console.address, told="tgr_no-such-token\n")
    assert done.code == 4
    assert "does not accept this token" in done.errors
    assert not (person.home / "tidegate").exists()


def test_contexts_are_listed_used_and_removed(person: Person, console: LiveConsole, token: str) -> None:
    person.output_of("login", console.address, "--name", "there", told=f"{token}\n")
    assert [line.split()[:2] for line in person.run("context").lines] == [
        ["here", console.address],
        ["*", "there"],
    ]
    person.output_of("context", "use", "here")
    assert person.run("context").lines[0].startswith("* here")
    assert person.run("whoami", "--context", "there").code == 0
    assert person.run("--context", "there", "whoami").code == 0
    person.output_of("context", "remove", "there")
    done = person.run("whoami", "--context", "there")
    assert (done.code, "There is no context 'there'. There are: here." in done.errors) == (2, True)


def test_variables_are_enough(console: LiveConsole, token: str, tmp_path: Path) -> None:
    person = Person(tmp_path, {"TIDEGATE_ADDRESS": console.address, "TIDEGATE_TOKEN": token})
    assert "ax-1" in person.output_of("get", "nodes")
    assert not (tmp_path / "tidegate").exists()


# Reading


def test_a_table_has_sizes_and_ages(person: Person) -> None:
    headings, first, *_ = person.run("get", "nodes").lines
    assert headings.split() == ["NAME", "STATE", "STAMP", "MEMORY", "CPUS", "VERSION", "LAST", "SEEN"]
    assert first.split()[:5] == ["ax-1", "ready", "east", "1", "TiB"]
    assert first.endswith(" ago")


def test_wide_has_more_and_no_headers_fewer(person: Person) -> None:
    wide = person.output_of("get", "nodes", "-o", "wide", "--no-headers")
    assert "tcp:127.0.0.1:8411" in wide
    assert "NAME" not in wide


def test_json_and_yaml_are_what_the_api_says(person: Person) -> None:
    [one, _] = person.run("get", "nodes", "-o", "json").value
    assert (one["kind"], one["name"], one["memory_bytes"]) == ("node", "ax-1", 1 << 40)
    assert person.run("get", "node/ax-1", "-o", "json").value["name"] == "ax-1"
    documents = list(yaml.safe_load_all(person.output_of("get", "node", "ax-1", "ax-2", "-o", "yaml")))
    assert [document["name"] for document in documents] == ["ax-1", "ax-2"]


def test_names_are_for_other_commands(person: Person) -> None:
    assert person.run("get", "no,box", "-o", "name").lines == ["node/ax-1", "node/ax-2", "box/cs-1"]


def test_filters_are_those_of_the_list(person: Person) -> None:
    assert person.run("get", "nodes", "--leaf", "leaf-2", "-o", "name").lines == ["node/ax-2"]
    assert person.run("get", "nodes", "--limit", "1", "-o", "name").lines == ["node/ax-1"]
    done = person.run("get", "boxes", "--leaf", "leaf-2")
    assert (done.code, done.errors) == (2, "tidegatectl: boxes are not found by --leaf.\n")


def test_lists_are_read_to_their_end(person: Person, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "PAGE_ROWS", 2)
    whole = person.run("get", "audit", "-o", "name").lines
    assert len(whole) > 4
    assert person.run("get", "audit", "--limit", "3", "-o", "name").lines == whole[:3]


def test_what_is_inside_others_has_their_name(person: Person) -> None:
    slug = org(person, "inside")
    person.output_of(
        "apply", "-f", "-", told=f"kind: member\norg: {slug}\nusername: admin\nrole: org admin\n"
    )
    assert person.run("get", "members", "--org", slug).lines[1].split() == [
        slug,
        "admin",
        "org",
        "admin",
    ]
    assert f"member/{slug}/admin" in person.run("get", "members", "-o", "name").lines
    assert person.run("get", f"member/{slug}/admin", "-o", "json").value["role"] == "org admin"
    assert person.run("get", "policy", slug, "-o", "json").value["follows_default"] is True
    assert person.run("get", f"member/{slug}/nobody").code == 3


def test_describing_shows_fields_changes_and_what_happened(person: Person) -> None:
    person.output_of("cordon", "ax-2", "--reason", "a new disk")
    told = person.output_of("describe", "node", "ax-2")
    person.output_of("uncordon", "ax-2")
    assert "Memory:" in told
    assert "1 TiB" in told
    assert "a new disk" in told
    assert "NAME   LEAF" in told
    assert "\nEvents:\n" in told


def test_everything_that_can_be_listed_is_listed(person: Person) -> None:
    """Each row of the table, before the console that it is about."""
    org(person, "listed")
    for resource in RESOURCES:
        done = person.run("get", resource.plural, "-o", "wide")
        assert done.code == 0, (resource.name, done.errors)


def test_an_explanation_of_an_unknown_request_says_so(person: Person) -> None:
    org(person, "asking")
    done = person.run("explain", "no-such-request", "--org", "asking")
    assert (done.code, done.output) == (3, "")
    assert "remembers request no-such-request" in done.errors


def test_top_is_printed_once_into_a_pipe(person: Person) -> None:
    assert "Nodes: " in person.output_of("top")
    for what in ("models", "orgs", "nodes", "drivers"):
        assert person.output_of("top", what) == "Nothing has reported numbers in the last minute.\n"


def test_versions_of_both_sides(person: Person) -> None:
    assert person.run("version").lines[:2] == ["tidegatectl 0.1.0", "console 0.1.0"]


# Changing


def test_apply_creates_then_changes_then_changes_nothing(person: Person, tmp_path: Path) -> None:
    path = tmp_path / "org.yaml"
    path.write_text(ORG.format("initech"))
    apply = ("apply", "-f", str(path))
    assert person.output_of(*apply) == "org/initech created\n"
    assert person.output_of(*apply) == "org/initech unchanged\n"
    path.write_text("kind: org\nslug: initech\nname: Initech Ltd\n")
    assert person.output_of(*apply, "--reason", "they have grown") == "org/initech configured\n"
    entry = person.run("get", "audit", "--search", "initech", "-o", "json").value[0]
    assert entry["reason"] == "they have grown"


def test_what_get_prints_can_be_applied(person: Person) -> None:
    person.output_of("apply", "-f", "-", told=MODEL)
    slug = org(person, "round")
    for what in ("model/chat", "replica/chat/chat-0", f"policy/{slug}", f"limits/{slug}", "node/ax-1"):
        printed = person.output_of("get", what, "-o", "yaml")
        assert person.output_of("apply", "-f", "-", told=printed) == f"{what} unchanged\n"
        printed = person.output_of("get", what, "-o", "json")
        assert person.output_of("apply", "-f", "-", told=printed) == f"{what} unchanged\n"
    for what in ("session-rules", "cluster-policy", "fleet"):
        printed = person.output_of("get", what, "-o", "yaml")
        assert person.output_of("apply", "-f", "-", told=printed) == f"{what} unchanged\n"


def test_fields_that_a_manifest_leaves_out_stay(person: Person) -> None:
    person.output_of("apply", "-f", "-", told=MODEL)
    slug = org(person, "half")
    person.output_of("apply", "-f", "-", told=f"kind: limits\norg: {slug}\nconcurrent: 7\n")
    person.output_of("apply", "-f", "-", told=f"kind: limits\norg: {slug}\nweight: 3\n")
    limits = person.run("get", "limits", slug, "-o", "json").value
    assert (limits["concurrent"], limits["weight"]) == (7, 3)
    person.output_of("apply", "-f", "-", told="kind: model\nname: chat\ntokens_max: 4096\n")
    model = person.run("get", "model", "chat", "-o", "json").value
    assert (model["tokens_max"], model["model"]) == (4096, "llama-chat")


def test_a_diff_says_what_apply_would_do(person: Person) -> None:
    slug = org(person, "differs")
    same = person.run("diff", "-f", "-", told=ORG.format(slug))
    assert (same.code, same.output) == (0, "")
    done = person.run("diff", "-f", "-", told=f"kind: org\nslug: {slug}\nname: Another\n")
    assert done.code == 1
    assert done.lines[-2:] == [f"-name: Org {slug}", "+name: Another"]
    new = person.run("diff", "-f", "-", told=ORG.format("not-there"))
    assert (new.code, "+slug: not-there" in new.lines) == (1, True)
    assert person.run("get", "org", "not-there").code == 3


def test_a_dry_run_is_checked_by_the_console_and_changes_nothing(person: Person) -> None:
    assert (
        person.output_of("apply", "-f", "-", "--dry-run", told=ORG.format("dry"))
        == "org/dry created (dry run)\n"
    )
    assert person.run("get", "org", "dry").code == 3
    done = person.run("apply", "-f", "-", "--dry-run", told="kind: org\nslug: NOT A SLUG\nname: x\n")
    assert done.code == 4
    assert done.errors.startswith(
        "tidegatectl: Some values are not allowed (InvalidRequest)\n  /path/slug: "
    )


def test_a_field_that_is_not_there_or_can_not_be_changed_is_usage(person: Person) -> None:
    slug = org(person, "fixed")
    done = person.run("apply", "-f", "-", told=f"kind: org\nslug: {slug}\nnmae: x\n")
    assert (done.code, done.errors) == (2, "tidegatectl: standard input: a org has no field `nmae`.\n")
    done = person.run("apply", "-f", "-", told="kind: alert\nid: 7\n")
    assert (done.code, "can't be applied" in done.errors) == (2, True)


def test_a_failure_does_not_keep_others_from_being_applied(person: Person) -> None:
    told = ORG.format("before") + "---\nkind: org\nslug: N O\nname: x\n---\n" + ORG.format("after")
    done = person.run("apply", "-f", "-", told=told)
    assert done.code == 4
    assert done.lines == ["org/before created", "org/after created"]


def test_answers_of_several_changes_are_one_document(person: Person) -> None:
    told = "---\n".join(map(ORG.format, ("first", "second")))
    made = person.run("apply", "-f", "-", "-o", "json", told=told).value
    assert [one["slug"] for one in made] == ["first", "second"]
    assert person.run("apply", "-f", "-", "-o", "json", told=told).value == []
    nodes = person.output_of("cordon", "ax-1", "ax-2", "-o", "yaml")
    assert [one["name"] for one in yaml.safe_load_all(nodes)] == ["ax-1", "ax-2"]
    assert person.run("uncordon", "ax-1", "-o", "json").value["name"] == "ax-1"
    assert [one["name"] for one in person.run("uncordon", "ax-1", "ax-2", "-o", "json").value] == [
        "ax-1",
        "ax-2",
    ]


def test_deleting_asks_or_is_told_yes(person: Person) -> None:
    slug = org(person, "goner")
    done = person.run("delete", "org", slug)
    assert (done.code, done.errors) == (2, "tidegatectl: Nobody is there to be asked. Say --yes.\n")
    assert person.output_of("delete", "org", slug, "--dry-run") == f"org/{slug} deleted (dry run)\n"
    assert person.output_of("delete", "org", slug, "--yes") == f"org/{slug} deleted\n"
    assert person.run("delete", "org", slug, "--yes").code == 3


def test_what_manifests_name_is_deleted_last_first(person: Person, tmp_path: Path) -> None:
    path = tmp_path / "model.yaml"
    path.write_text(MODEL)
    person.output_of("apply", "-f", str(path))
    done = person.run("delete", "-f", str(path), "--yes")
    assert done.lines == ["replica/chat/chat-0 deleted", "model/chat deleted"]


def test_a_person_at_a_terminal_is_asked(person: Person) -> None:
    slug = org(person, "asked")
    with person.terminal("delete", "org", slug) as terminal:
        terminal.until(f"Delete org/{slug}? [y/N]")
        terminal.type("n\n")
        assert "Nothing was deleted." in terminal.all()
        assert terminal.process.returncode == 1
    assert person.run("get", "org", slug).code == 0


WITHOUT_AX_2 = yaml.safe_dump(
    {"kind": "fleet", "yaml": FLEET.replace(", ax-2: {nics: {eth0: {leaf: leaf-2}}}", "")}
)
REMOVES = "fleet removes nodes that are alive: ax-2.\n"


def nodes(person: Person) -> list[str]:
    return person.run("get", "nodes", "-o", "name").lines


def test_a_description_that_removes_nodes_that_are_alive_asks_or_is_told_yes(
    person: Person, console: LiveConsole, token: str, tmp_path: Path
) -> None:
    path = tmp_path / "fleet.yaml"
    path.write_text(WITHOUT_AX_2)
    there, whole = nodes(person), yaml.safe_dump({"kind": "fleet", "yaml": FLEET})
    done = person.run("apply", "-f", str(path))
    assert done.code == 2
    assert done.errors == f"{REMOVES}tidegatectl: Nobody is there to be asked. Say --yes.\n"
    done = person.run("apply", "-f", str(path), "--dry-run")
    assert (done.code, done.errors, done.lines[0]) == (0, REMOVES, "fleet configured (dry run)")
    done = person.run("diff", "-f", str(path))
    assert (done.code, done.errors) == (1, REMOVES)
    reader = Person(tmp_path / "reader")
    reader.output_of("login", console.address, told=f"{console.token(read_only=True)}\n")
    done = reader.run("diff", "-f", str(path))
    assert (done.code, done.output[:3]) == (1, "---")
    assert done.errors.startswith("Whether it removes nodes that are alive is not known: ")
    with person.terminal("apply", "-f", str(path)) as terminal:
        terminal.until("Apply it? [y/N]")
        terminal.type("n\n")
        assert "Nothing was changed." in terminal.all()
        assert terminal.process.returncode == 1
    assert nodes(person) == there == ["node/ax-1", "node/ax-2"]
    try:
        done = person.run("apply", "-f", str(path), "--yes")
        assert (done.code, done.errors, done.output) == (0, REMOVES, "fleet configured\n")
        assert nodes(person) == ["node/ax-1"]
        # Of a node that has not joined nothing is lost, and nobody is asked.
        assert person.output_of("apply", "-f", "-", told=whole) == "fleet configured\n"
        assert person.output_of("apply", "-f", str(path)) == "fleet configured\n"
    finally:
        person.output_of("apply", "-f", "-", told=whole)
        join(console, "ax-2")
    assert nodes(person) == there


def test_nodes_are_cordoned_and_their_conditions_waited_for(person: Person) -> None:
    assert person.output_of("cordon", "ax-1", "node/ax-2") == "node/ax-1 cordoned\nnode/ax-2 cordoned\n"
    assert person.run("wait", "node/ax-1", "--for", "state=cordoned").code == 0
    done = person.run("wait", "node/ax-1", "--for", "state=ready", "--timeout", "500ms")
    assert done.code == 6
    assert "node/ax-1 was not 'state=ready' within 500 ms." in done.errors
    person.output_of("uncordon", "node", "ax-1", "ax-2")
    assert person.run("get", "nodes", "--state", "ready", "-o", "name").lines == [
        "node/ax-1",
        "node/ax-2",
    ]


def test_what_does_not_fit_is_usage(person: Person) -> None:
    for words in (
        ["cordon", "session/chat"],
        ["get", "teapots"],
        ["get", "member/acme"],
        ["get", "node", ".."],
        ["describe", "ax-1"],
        ["wait", "node/ax-1", "--for", "never"],
        ["scale", "session/chat"],
        ["delete", "node/ax-1", "--yes"],
        ["get", "nodes,boxes", "--watch"],
        ["nonsense"],
        ["get", "nodes", "--interval", "0"],
    ):
        done = person.run(*words)
        assert done.code == 2, (words, done)
        assert done.errors


# What goes wrong


def test_problems_are_sentences_with_codes(person: Person, console: LiveConsole, tmp_path: Path) -> None:
    missing = person.run("describe", "node", "ax-9")
    assert (missing.code, missing.errors) == (
        3,
        "tidegatectl: There is no node/ax-9, or you may not see it.\n",
    )
    reader = Person(tmp_path / "reader")
    reader.output_of("login", console.address, told=f"{console.token(read_only=True)}\n")
    refused = reader.run("cordon", "ax-1")
    assert refused.code == 4
    assert "(Forbidden)" in refused.errors


def test_a_stale_version_is_a_conflict(person: Person, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody else changes it between our reading and our writing."""
    slug = org(person, "race")
    planned = changes.planned

    def overtaken(asked: Any, manifest: Any, reason: str) -> Any:
        change = planned(asked, manifest, reason)
        asked.ask("PATCH", f"/orgs/{slug}", body={"name": "First"}, if_match="*")
        return change

    monkeypatch.setattr(writes, "planned", overtaken)
    done = person.run("apply", "-f", "-", told=f"kind: org\nslug: {slug}\nname: Second\n")
    assert done.code == 5
    assert "(StaleVersion)" in done.errors
    assert person.run("get", "org", slug, "-o", "json").value["name"] == "First"


# Terminals and pipes


def test_a_terminal_gets_colour_that_fits_and_a_pipe_does_not(person: Person) -> None:
    with person.terminal("get", "nodes", "-o", "wide", columns=60) as terminal:
        shown = terminal.all()
    assert "\x1b[32mready" in shown
    assert "…" in shown
    with person.terminal("get", "nodes", NO_COLOR="1") as terminal:
        assert "\x1b[" not in terminal.all()
    assert "\x1b[" not in person.output_of("get", "nodes")


def test_a_terminal_without_utf_8_is_spoken_to_in_its_own(person: Person) -> None:
    slug = "wort"
    person.output_of("apply", "-f", "-", told=f"kind: org\nslug: {slug}\nname: Wörter → und 東京\n")
    with person.terminal("get", "org", slug, PYTHONIOENCODING="ascii") as terminal:
        assert "W?rter -> und ??" in terminal.all()
    with person.terminal("get", "org", slug, "-o", "json", PYTHONIOENCODING="ascii") as terminal:
        assert "W\\u00f6rter" in terminal.all()
        assert terminal.process.returncode == 0


def test_names_can_not_speak_to_the_terminal(person: Person) -> None:
    org(person, "sly")
    done = person.run("apply", "-f", "-", told='kind: org\nslug: sly\nname: "a\\u202eb\\x9b31mc"\n')
    if done.code == 0:  # the console may refuse it as well
        shown = person.output_of("get", "org", "sly")
        assert "\x9b" not in shown
        assert "\u202e" not in shown


def test_a_reader_that_has_enough_ends_it_quietly(person: Person) -> None:
    with person.process("get", "audit", "-o", "json") as process:
        assert process.stdout is not None
        process.stdout.close()
        assert process.wait(60) == 141
        assert process.stderr is not None
        assert process.stderr.read() == b""


def test_watching_prints_what_changes(person: Person) -> None:
    with person.process("get", "nodes", "--watch", "--interval", "200ms") as process:
        assert process.stdout is not None
        first = [process.stdout.readline().split()[0] for _ in range(3)]
        assert first == [b"NAME", b"ax-1", b"ax-2"]
        person.output_of("cordon", "ax-1")
        assert process.stdout.readline().split()[:2] == [b"ax-1", b"cordoned"]
        person.output_of("uncordon", "ax-1")
        assert process.stdout.readline().split()[:2] == [b"ax-1", b"ready"]
        process.send_signal(2)
        assert process.wait(30) == 130
        assert process.stderr is not None
        assert process.stderr.read() == b""


def test_watching_says_what_is_deleted(person: Person) -> None:
    slug = org(person, "watched")
    with person.process("get", "org", slug, "--watch", "--interval", "200ms", "-o", "name") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"org/watched\n"
        person.output_of("delete", "org", slug, "--yes")
        assert process.wait(30) == 3


def test_what_is_watched_by_a_program_can_be_read(person: Person) -> None:
    """Each document is one of a stream, and sentences are elsewhere."""
    slug = org(person, "followed")
    with person.process("get", "orgs", "--watch", "--interval", "200ms", "-o", "yaml") as process:
        assert process.stdout is not None
        assert process.stderr is not None
        read = b""
        while b"slug: followed\n" not in read:
            read += process.stdout.readline()
        person.output_of("delete", "org", slug, "--yes")
        assert process.stderr.readline() == b"org/followed deleted\n"
        org(person, "followed-by")
        while b"slug: followed-by\n" not in read:
            read += process.stdout.readline()
        process.send_signal(2)
        read += process.stdout.read()
    slugs = [one["slug"] for one in yaml.safe_load_all(read)]
    assert slug in slugs
    assert slugs[-1] == "followed-by"


def test_top_is_live_at_a_terminal(person: Person) -> None:
    with person.terminal("top", "--interval", "200ms") as terminal:
        terminal.until("Nodes: ")
        assert terminal.interrupt() == 130


# Completion


def completed(person: Person, line: str, tmp_path: Path) -> list[str]:
    """What a real bash offers when Tab is pressed at the end of this line."""
    command = tmp_path / "bin" / "tidegatectl"
    command.parent.mkdir(exist_ok=True)
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m console.ctl "$@"\n')
    command.chmod(0o755)
    script = f"""
source <(tidegatectl completion bash)
read -ra COMP_WORDS <<< {line!r}
[[ {line!r} == *' ' ]] && COMP_WORDS+=('')
COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))
_tidegatectl 2>/dev/null
printf '%s\\n' "${{COMPREPLY[@]}}"
"""
    done = subprocess.run(
        ["/bin/bash", "--norc", "-c", script],
        env={**person.environment, "PATH": f"{command.parent}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.split()


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("tidegatectl unc", ["uncordon"]),
        ("tidegatectl get nod", ["nodes"]),
        ("tidegatectl get node ", ["ax-1", "ax-2"]),
        ("tidegatectl cordon ax-", ["ax-1", "ax-2"]),
        ("tidegatectl get nodes -o ", ["json", "name", "wide", "yaml"]),
        ("tidegatectl get nodes --inte", ["--interval"]),
        ("tidegatectl completion ", ["bash", "fish", "zsh"]),
        ("tidegatectl whoami --context ", ["here"]),
    ],
)
def test_bash_completes(person: Person, tmp_path: Path, line: str, offered: list[str]) -> None:
    found = completed(person, line, tmp_path)
    assert [one for one in found if not one.startswith("--") or offered[0].startswith("--")] == offered


def test_completion_is_silent_where_nobody_is_logged_in(tmp_path: Path) -> None:
    assert completed(Person(tmp_path / "nobody"), "tidegatectl cordon ", tmp_path)[0].startswith("--")


def test_completion_of_a_file_is_the_shells(person: Person) -> None:
    assert person.run("__complete", "apply", "-f", "").output == "__files__\n"


def test_a_console_that_stops_is_unavailable(console: LiveConsole, person: Person) -> None:
    console.stop()
    try:
        done = person.run("get", "nodes", "--request-timeout", "1s")
        assert done.code in (6, 7)  # its socket still listens, so nobody answers
        assert "did not answer within 1 s" in done.errors
    finally:
        console.process = console.serve()
        wait_until("it answers", lambda: person.run("whoami").code == 0)
