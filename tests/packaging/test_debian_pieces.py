"""What `tidegate-host` writes is what systemd, shells and Tidegate's processes read."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from tidegate_host import (
    certificates,
    cli,
    env_files,
    host,
    options,
    releases,
    roles,
    servers,
    services,
    settings,
)
from tidegate_host.machine import Failed, Machine, ask
from tidegate_host.options import Wanted
from tidegate_host.settings import Secrets

from console.environment import PROJECT, Environment
from console.stack import redis_users
from kvss_agent.process import options as process_options
from tests.packaging.wheels import LOCK

ALL = Wanted(
    roles=tuple(roles.ROLES), host="box.example.org", drivers=("job-7", "job-8"), local_servers=True
)
NOTHING = Secrets()


def test_a_file_of_settings_keeps_what_an_operator_wrote() -> None:
    text = "# ours\nA='1'\n  B = no setting\nC=\"two words\"\n"
    assert env_files.parse(text) == {"A": "1", "C": "two words"}
    changed = env_files.merged(text, {"A": "9", "D": "new"}, {"C": "other"}, "title")
    assert changed == "# ours\nA='1'\n  B = no setting\nC='other'\nD='new'\n"
    assert env_files.merged(changed, {"A": "9", "D": "9"}, {"C": "other"}, "title") == changed


def test_what_cannot_be_quoted_is_refused() -> None:
    for value in ("it's", "a\nb"):
        with pytest.raises(env_files.Unquotable):
            env_files.merged("", {"A": value}, {}, "title")


def test_a_shell_reads_the_same(tmp_path: Path) -> None:
    value = "redis://a:b$c`d\\e@host/0?x=1&y=2"
    file = tmp_path / "settings.env"
    file.write_text(env_files.merged("", {"A": value}, {}, "title"))
    done = subprocess.run(
        ["/bin/sh", "-c", f'. {file}; printf %s "$A"'], capture_output=True, text=True, check=True
    )
    assert done.stdout == value == env_files.read(file)["A"]


def test_every_unit_is_of_a_role_and_starts_a_command_of_the_wheel() -> None:
    units = {path.name for path in roles.UNITS.iterdir() if path.is_file()}
    assert units == {unit for role in roles.ROLES.values() for unit in role.units}
    scripts = set(tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]["scripts"])
    for name in units:
        text = (roles.UNITS / name).read_text()
        for program in re.findall(r"^ExecStart=/opt/tidegate/current/bin/(\S+)", text, re.MULTILINE):
            assert program in scripts | {"celery"}, name
    for role in roles.ROLES.values():
        for unit in role.units:
            text = (roles.UNITS / unit).read_text()
            assert unit.endswith(".socket") or f"User={role.user}\n" in text
            for name in re.findall(r"^EnvironmentFile=-?/etc/tidegate/(\S+)", text, re.MULTILINE):
                assert name in role.env or "%i" in name, unit


def test_each_process_of_the_console_takes_its_settings() -> None:
    """Names and values, as the process itself reads them at its start."""
    made = settings.settings(ALL, NOTHING, settings.server_secrets())
    for role in (role.name for role in ALL.all_roles if role.is_console):
        variables = {**made["console"].missing, **made[role].missing}
        read = Environment.read(variables)
        assert read.allowed_hosts == ("box.example.org", "localhost")
        assert ("ingest" in str(read.ingest_url)) == (role == "ingest")
    owner = Environment.read({**made["console"].missing, **made["prepare"].missing})
    assert settings.OWNER in owner.database_url
    assert settings.OWNER not in made["console"].missing["DATABASE_URL"]


def test_two_drivers_of_a_machine_have_addresses_of_their_own() -> None:
    made = settings.settings(ALL, NOTHING, {})
    found = {made[f"driver-{name}"].missing["SWDRIVER_CONTROL"] for name in ALL.drivers}
    assert found == {"0.0.0.0:8420", "0.0.0.0:8421"}


def test_a_join_token_is_for_its_own_kind_of_process() -> None:
    made = settings.settings(ALL, Secrets(join_tokens={"agent": "tgj_x"}), {})
    with_token = {name for name, one in made.items() if any("JOIN" in key for key in one.asked)}
    assert with_token == {"agent"}


def test_redis_has_the_users_of_one_server_and_no_others() -> None:
    for server, users in (("broker", redis_users.BROKER), ("telemetry", redis_users.TELEMETRY)):
        assert set(settings.redis_users(server)) == {user.name for user in users}


def test_each_redis_refuses_before_the_memory_of_the_machine_is_full() -> None:
    for name in servers.SERVERS:
        lines = servers.configuration(name, settings.server_secrets()).splitlines()
        assert "maxmemory-policy noeviction" in lines
        assert any(re.fullmatch(r"maxmemory \d+[mg]b", line) for line in lines), name


def test_each_process_has_the_redis_users_that_the_docs_say() -> None:
    """Those of *Redis by role*, where every process of a console has its row."""
    passwords = {
        f"{server}_{user}".upper(): "x"
        for server in ("broker", "telemetry")
        for user in settings.redis_users(server)
    }
    made = settings.settings(ALL, NOTHING, {"DATABASE_OWNER": "x", **passwords})
    shared = _redis_users(made["console"].missing)
    found = {
        {"schedule": "beat"}.get(name, name): {**shared, **its}
        for name, one in made.items()
        if "REDIS_URL" in (its := _redis_users(one.missing))
    }
    assert {"web", "worker", "beat", "ingest", "rollup", "orchestrator", "prepare"} == found.keys()
    assert found == _redis_by_role()


def _redis_users(its: Mapping[str, str]) -> dict[str, str]:
    """By setting, of those that are addresses of Redis."""
    return {
        name: urlsplit(value).username or ""
        for name, value in its.items()
        if urlsplit(value).scheme in ("redis", "rediss")
    }


def _redis_by_role() -> dict[str, dict[str, str]]:
    text = (PROJECT / "docs" / "production.md").read_text()
    rows = text.partition("## Redis by role")[2].partition("\n## ")[0].splitlines()
    found = {}
    for row in rows:
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        if not row.startswith("|") or not re.fullmatch(r"`\w+`", cells[1]) or cells[0] == "process":
            continue
        users = {"REDIS_URL": cells[1].strip("`"), "TIDEGATE_TELEMETRY_URL": cells[2].strip("`")}
        users |= dict(re.findall(r"`(TIDEGATE_\w+)`,? as `(\w+)`", cells[3]))
        found[cells[0].strip("`")] = users
    return found


def test_what_is_wanted_is_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options, "REMEMBERED", tmp_path / "host.json")
    assert options.remembered() == Wanted()
    (tmp_path / "host.json").write_text(options.as_text(ALL))
    assert options.remembered() == ALL
    (tmp_path / "host.json").write_text("{")
    with pytest.raises(Failed, match="can't be read"):
        options.remembered()


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"roles": ()}, "--roles"),
        ({"roles": ("agent",)}, "--console"),
        ({"drivers": ()}, "--driver"),
        ({"workers": 0}, "--workers"),
        ({"tier2": ("kv",)}, "--tier2 kv: give the whole path"),
    ],
)
def test_what_contradicts_itself_is_refused(change: dict[str, object], sentence: str) -> None:
    with pytest.raises(Failed, match=sentence):
        replace(ALL, **change).check()  # type: ignore[arg-type]


def test_a_role_that_there_is_not_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(ValueError, match=r"“wbe” is no role\. Roles: console, ingest"):
        roles.chosen("wbe")


def test_workers_and_drivers_are_instances_of_their_units() -> None:
    units = [unit for unit, _ in services.wanted_units(replace(ALL, workers=2))]
    assert [unit for unit in units if "@" in unit] == [
        *("tidegate-worker@1.service", "tidegate-worker@2.service"),
        *("tidegate-driver@job-7.service", "tidegate-driver@job-8.service"),
    ]


def test_a_release_is_named_by_what_it_is_made_of(tmp_path: Path) -> None:
    wheel, lock = tmp_path / "tidegate-0.2.0-py3-none-any.whl", tmp_path / "run.txt"
    wheel.write_bytes(b"wheel")
    lock.write_bytes(b"lock")
    source = releases.Source(wheel, lock, ("agent",))
    assert source.name.startswith("0.2.0-")
    before = source.name
    of_other_roles = replace(source, extras=("agent", "brain")).name
    assert before != of_other_roles
    assert releases.software(Path(before)) == releases.software(Path(of_other_roles))
    lock.write_bytes(b"another")
    assert releases.software(Path(before)) != releases.software(Path(source.name))


def test_another_role_leaves_the_release_to_go_back_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("CURRENT", "PREVIOUS"):
        monkeypatch.setattr(releases, name, tmp_path / name.lower())
    first, second, with_brain = (tmp_path / one for one in ("0.1.0-a-x", "0.2.0-b-x", "0.2.0-b-y"))
    for release in (first, second, with_brain):
        release.mkdir()
        assert releases.switch(Machine(dry_run=False), release)
    assert (releases.current(), releases.previous()) == (with_brain, first)


@pytest.mark.parametrize(
    ("wanted", "sentence"),
    [
        # Its own authority would be one that the console does not know.
        (Wanted(roles=("brain",), host="b-1", console_url="https://c"), "certificate --host b-1"),
        (Wanted(roles=("cluster",), host="c-1"), "certificate --host c-1"),
    ],
)
def test_a_machine_that_is_no_console_gets_a_certificate_of_its_consoles_authority(
    wanted: Wanted, sentence: str, tmp_path: Path
) -> None:
    with pytest.raises(Failed, match=sentence):
        install_dry(wanted, tmp_path)


def test_a_cluster_server_beside_a_console_gets_no_key_of_it(tmp_path: Path) -> None:
    wanted = Wanted(roles=("web", "orchestrator", "cluster"), host="box")
    with pytest.raises(Failed, match="Engines can read the key"):
        install_dry(wanted, tmp_path, (tmp_path / "pem", tmp_path / "key"))


def test_local_servers_go_with_no_certificate_of_others(tmp_path: Path) -> None:
    wanted = Wanted(roles=("web",), host="box", local_servers=True)
    with pytest.raises(Failed, match="reached as localhost"):
        install_dry(wanted, tmp_path, (tmp_path / "pem", tmp_path / "key"))


def install_dry(wanted: Wanted, folder: Path, given: tuple[Path, Path] | None = None) -> None:
    """Which ends with what a machine of this kind is missing."""
    machine = Machine(dry_run=True)
    source = releases.Source(folder / "tidegate-0.2.0-py3-none-any.whl", folder / "run.txt", ())
    host.install(
        *(machine, wanted, NOTHING, source, given, None), start=False, wait_for_migrations=False
    )


def test_a_certificate_for_another_machine_is_of_the_authority_of_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(certificates, "TLS", tmp_path)
    monkeypatch.setattr(certificates, "AUTHORITY", tmp_path / "authority.pem")
    monkeypatch.setattr(certificates, "AUTHORITY_KEY", tmp_path / "authority.key")
    machine = Machine(dry_run=False)
    with pytest.raises(Failed, match="run this on the first machine"):
        certificates.for_another(machine, "brain-1.example.org", tmp_path)
    certificates.local(machine, "box.example.org", (), is_cluster_here=False, for_console=False)
    made = certificates.for_another(machine, "brain-1.example.org", tmp_path)
    assert certificates.key_of(made).stat().st_mode & 0o777 == 0o600
    names = ask("openssl", "x509", "-in", str(made), "-noout", "-ext", "subjectAltName")
    assert names.splitlines()[1].strip() == "DNS:brain-1.example.org"
    ask("openssl", "verify", "-CAfile", str(tmp_path / "authority.pem"), str(made))
    before = machine.changes
    certificates.for_another(machine, "brain-1.example.org", tmp_path)
    assert machine.changes == before
    with pytest.raises(Failed, match="no name of a machine"):
        certificates.for_another(machine, "a,DNS:console.example.org", tmp_path)


def test_an_address_may_be_of_the_sixth_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And is found in its certificate, which is not issued again each time."""
    for name in ("AUTHORITY", "AUTHORITY_KEY", "HOST", "HOST_KEY"):
        path: Path = getattr(certificates, name)
        monkeypatch.setattr(certificates, name, tmp_path / path.name)
    monkeypatch.setattr(certificates, "TLS", tmp_path)
    machine = Machine(dry_run=False)
    changes = []
    for _ in range(2):
        certificates.local(
            *(machine, "fd00::1", [certificates.HOST]), is_cluster_here=False, for_console=False
        )
        changes.append(machine.changes)
    assert changes[0] == changes[1]


def test_an_address_of_the_sixth_version_is_in_brackets_before_a_port() -> None:
    made = settings.settings(replace(ALL, host="fd00::1"), NOTHING, settings.server_secrets())
    found = {name: value for file in made.values() for name, value in file.missing.items()}
    for name in ("TIDEGATE_PUBLIC_URL", "TIDEGATE_OWN_TELEMETRY_URL", "KVSS_AGENT_CONTROL_URL"):
        assert urlsplit(found[name]).hostname == "fd00::1"
    assert found["SWDRIVER_CONTROL_URL"] == "https://[fd00::1]:8421"
    assert found["KVSS_AGENT_DATA_ADDRESS"] == "tcp:[fd00::1]:8411"
    read = Environment.read({**made["console"].missing, **made["web"].missing})
    assert read.allowed_hosts == ("[fd00::1]", "localhost")


def test_processes_of_a_machine_with_an_address_of_the_sixth_version_listen_there() -> None:
    remote = replace(
        ALL, host="fd00::1", roles=("brain", "agent", "driver", "cluster"), local_servers=False
    )
    made = settings.settings(remote, NOTHING, {})
    places = {
        name: value
        for file in made.values()
        for name, value in file.missing.items()
        if name.endswith(("_CONTROL", "_LISTEN", "_TCP"))
    }
    assert len(places) == 6
    assert {process_options.place(value)[0] for value in places.values()} == {"::"}


def test_an_address_of_the_sixth_version_is_no_name_of_a_node() -> None:
    wanted = replace(ALL, host="fd00::1", roles=("agent",), drivers=(), console_url="https://console")
    with pytest.raises(Failed, match="--name"):
        wanted.check()
    replace(wanted, name="box").check()


def test_what_follows_from_the_name_of_a_machine_follows_another_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its certificate has the new one alone. What an operator has set stays, as does a node's name."""
    monkeypatch.setattr(settings, "ETC", tmp_path)
    monkeypatch.setattr(options, "REMEMBERED", tmp_path / "host.json")
    machine = Machine(dry_run=False)
    of_servers = settings.server_secrets()

    def install(wanted: Wanted) -> dict[str, str]:
        settings.write(machine, wanted, NOTHING, of_servers)
        options.REMEMBERED.write_text(options.as_text(wanted))
        names = ("console", "web", "agent")
        return {
            key: value
            for name in names
            for key, value in env_files.read(tmp_path / f"{name}.env").items()
        }

    first = Wanted(roles=("web", "agent"), host="a.example.org", local_servers=True)
    before = install(first)
    agent = tmp_path / "agent.env"
    agent.write_text(agent.read_text().replace("tcp:a.example.org:", "tcp:10.0.0.1:"))
    found = install(replace(first, host="b.example.org", https_port=8443))
    assert found["TIDEGATE_ALLOWED_HOSTS"] == "b.example.org,localhost"
    assert found["TIDEGATE_PUBLIC_URL"] == found["KVSS_AGENT_CONSOLE"] == "https://b.example.org:8443"
    assert urlsplit(found["TIDEGATE_OWN_TELEMETRY_URL"]).hostname == "b.example.org"
    assert found["KVSS_AGENT_CONTROL_URL"] == "https://b.example.org:8410"
    assert found["KVSS_AGENT_DATA_ADDRESS"] == "tcp:10.0.0.1:8411"
    assert found["KVSS_AGENT_NAME"] == "a"
    assert found["TIDEGATE_SECRET_KEY"] == before["TIDEGATE_SECRET_KEY"]
    changes = machine.changes
    install(replace(first, host="b.example.org", https_port=8443))
    assert machine.changes == changes
    found = install(replace(first, host="b.example.org", https_port=8443, name="ax-9"))
    assert found["KVSS_AGENT_NAME"] == "ax-9"


def test_each_install_prepares_the_database_that_the_settings_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the release that was there before, too."""
    monkeypatch.setattr(host, "ETC", tmp_path)
    release = tmp_path / "0.2.0-a-x"
    program = release / "bin" / "tidegate"
    program.parent.mkdir(parents=True)
    program.write_text(f'#!/bin/sh\necho "$DATABASE_URL $*" >> {tmp_path}/ran\n')
    program.chmod(0o755)
    monkeypatch.setattr(roles, "CONSOLE_USER", "root")
    monkeypatch.setattr(settings, "CONSOLE_STATE", str(tmp_path))
    for number in (1, 2):
        (tmp_path / "console.env").write_text(f"DATABASE_URL=postgresql:///{number}\n")
        host._prepare(Machine(dry_run=False), release, wait=False)
    ran = (tmp_path / "ran").read_text().splitlines()
    assert ran == [f"postgresql:///{number} manage prepare" for number in (1, 2)]


def test_a_command_has_the_settings_as_systemd_reads_them(tmp_path: Path) -> None:
    """To a shell `&` ends a command, and `$$` is a number."""
    url = "postgresql://owner:pa$$word@db/tidegate?sslmode=require&connect_timeout=3"
    for name, text in (
        ("systemd-run", f"echo \"$@\" > {tmp_path}/asked; printf '%s\\0' 'DATABASE_URL={url}'"),
        ("runuser", f'printf "%s\\n" "$DATABASE_URL" "$PWD" "$@" > {tmp_path}/ran'),
    ):
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    script = tmp_path / "tidegate-manage"
    script.write_text(host.MANAGE_TEXT.replace("/var/lib/tidegate", str(tmp_path)))
    subprocess.run(
        [sys.executable, script, "backup", "a $file"], env={"PATH": f"{tmp_path}:/bin"}, check=True
    )
    asked = (tmp_path / "asked").read_text()
    assert asked.index("EnvironmentFile=/etc/tidegate/console.env") < asked.index(
        "=-/etc/tidegate/prepare.env"
    )
    ran = (tmp_path / "ran").read_text().splitlines()
    assert ran[:2] == [url, str(tmp_path)]
    assert ran[-2:] == ["backup", "a $file"]


def test_what_is_mounted_is_emptied_and_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "column").write_text("of an org")
    monkeypatch.setattr(Path, "is_mount", lambda path: path == tmp_path)
    machine = Machine(dry_run=False)
    machine.absent(tmp_path)
    assert list(tmp_path.iterdir()) == []
    machine.absent(tmp_path)
    assert machine.changes == 1


def test_a_package_with_a_version_for_each_python_keeps_the_hashes_of_all() -> None:
    text = LOCK.read_text()
    found = releases.locked(text)
    lines = re.findall(r"^[a-z0-9]\S*==\S+", text, re.MULTILINE)
    assert len(lines) > len(found)  # the lock has such a package
    assert sorted(lines) == sorted(one.split()[0] for blocks in found.values() for one in blocks)
    assert {"python_full_version < '3.12'", "python_full_version >= '3.12'"} == {
        one.partition("\n")[0].partition(" ; ")[2].rstrip(" \\") for one in found["scipy"]
    }
    assert all("--hash=sha256:" in one for blocks in found.values() for one in blocks)


def test_who_is_not_root_is_told_so(capsys: pytest.CaptureFixture[str]) -> None:
    if Path("/proc/self").stat().st_uid == 0:
        pytest.skip("this is root")
    assert cli.main(["rollback"]) == 1
    assert "sudo" in capsys.readouterr().err


def test_a_dry_run_of_a_file_writes_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    machine = Machine(dry_run=True)
    assert machine.file(tmp_path / "x", "text")
    machine.directory(tmp_path / "folder", 0o755)
    machine.link(tmp_path / "link", tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert capsys.readouterr().out.count("would ") == machine.changes == 3


def test_help_names_every_role(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["install", "--help"])
    said = capsys.readouterr().out
    for name in (*roles.ROLES, *roles.SETS):
        assert re.search(rf"^  {name} ", said, re.MULTILINE)
