"""A backup is of one moment, has everything, and is restored into an empty database or not at all."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import psycopg
import pytest
from django.conf import settings
from django.core.management import call_command
from django.core.management.base import CommandError
from django.db import connection, transaction
from django.db.migrations.recorder import MigrationRecorder
from django.utils import timezone
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict

from console.accounts.principal import SYSTEM
from console.audit.services import Subject, record
from console.environment import PROJECT
from console.fleet.models import Driver
from console.shell import backup, backup_file
from console.shell.backup_file import CannotBackUp
from console.shell.management.commands import prepare
from console.stack import binaries
from console.stack.binaries import find_postgres
from console.workloads.models import Tokenizer
from tests.conftest import People
from tests.console.releases import RECORDED
from tests.console.shell import backups
from tests.live import wait_until
from tests.prepared import database
from workload_manager.tokenizers.archive import digest

pytestmark = [pytest.mark.slow, pytest.mark.django_db(transaction=True)]

PG_DUMP = find_postgres().directory / "pg_dump"
SECRET = "a-token-that-nobody-may-read"
TOKENIZER = b"{}"
WITHOUT = ("--without-numbers", "--without-tokenizers")
SHA256 = digest({"tokenizer.json": TOKENIZER})


@pytest.fixture
def tokenizer(settings: Any, tmp_path: Path) -> Path:
    settings.TOKENIZERS = tmp_path / "tokenizers"
    file: Path = settings.TOKENIZERS / "sha256" / SHA256 / "tokenizer.json"
    file.parent.mkdir(parents=True)
    file.write_bytes(TOKENIZER)
    Tokenizer.objects.create(sha256=SHA256, name="small", size_bytes=len(TOKENIZER))
    return file


@pytest.fixture
def written(people: People, tokenizer: Path, tmp_path: Path) -> Path:
    """A backup of a console with people, a secret, an audit entry, numbers and a tokenizer."""
    Driver.objects.create(
        name="job1",
        control_token=SECRET,
        control_url="http://127.0.0.1:1",
        heartbeat_sha256=b"x" * 32,
        joined_at=timezone.now(),
    )
    with transaction.atomic(), connection.cursor() as cursor:
        record(SYSTEM, "tests.backed-up", Subject("tests", "1", "something"))
        cursor.execute(
            "INSERT INTO telemetry_topic (name, seen_on) VALUES ('fleet', now()) RETURNING id"
        )
        [topic] = cursor.fetchone()
        cursor.execute(
            "INSERT INTO telemetry_storedshape (digest, encoded, seen_on) VALUES ('d', 'e', now()) "
            "RETURNING id"
        )
        [shape] = cursor.fetchone()
        cursor.execute(
            "INSERT INTO telemetry_fresh (topic, shape, bucket, cells) VALUES (%s, %s, 10, 'c')",
            [topic, shape],
        )
    target = tmp_path / "backup"
    call_command("backup", str(target), verbosity=0)
    return target


def restored(
    url: str, file: Path, folder: Path, *options: str, **environment: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "manage.py", "restore", str(file), *options],
        cwd=PROJECT,
        env={
            **os.environ,
            "DATABASE_URL": url,
            "TIDEGATE_TOKENIZERS_DIR": str(folder),
            **environment,
        },
        capture_output=True,
        text=True,
        check=False,
    )


@contextmanager
def into(url: str) -> Iterator[None]:
    """This process restores into another database."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(connection.settings_dict, "NAME", conninfo_to_dict(url)["dbname"])
        yield


def contents(url: str) -> dict[str, list[str]]:
    """All rows of all tables, as text."""
    with psycopg.connect(url) as reading:
        return {
            table: sorted(
                str(row)
                for [row] in reading.execute(
                    sql.SQL("SELECT t::text FROM {} AS t").format(sql.Identifier(table))
                )
            )
            for table in backup._tables(reading)
        }


def own_url() -> str:
    name = connection.settings_dict["NAME"]
    return os.environ["DATABASE_URL"].replace("/tidegate?", f"/{name}?")


def test_everything_is_there_after_it_was_restored(written: Path, tmp_path: Path) -> None:
    before = contents(own_url())
    assert before["telemetry_fresh"]
    with database("template1") as url:
        done = restored(url, written, tmp_path / "elsewhere")
        assert done.returncode == 0, done.stderr
        assert "Restored" in done.stdout
        assert done.stderr == ""
        assert contents(url) == before
        copied = tmp_path / "elsewhere" / "sha256" / SHA256 / "tokenizer.json"
        assert copied.read_text() == "{}"
        with psycopg.connect(url) as changing:
            with pytest.raises(psycopg.Error, match="audit"):
                changing.execute("DELETE FROM audit_auditentry")
            changing.rollback()
            changing.execute(  # numbers go on where they were
                "INSERT INTO telemetry_topic (name, seen_on) VALUES ('other', now())"
            )
        again = restored(url, written, tmp_path / "elsewhere")
        assert again.returncode
        assert "The database is not empty" in again.stderr


def test_a_database_of_the_version_before_is_taken_over_and_so_are_backups_of_it(tmp_path: Path) -> None:
    """One that was taken over keeps the names of its migrations, and has backups like the one before."""
    rows = MigrationRecorder.Migration.objects.filter(app__in=RECORDED)
    ours = list(rows)
    rows.delete()
    for app, names in RECORDED.items():
        rows.bulk_create(rows.model(app=app, name=name) for name in names.split())
    try:
        call_command("backup", str(tmp_path / "backup"), verbosity=0)
        with database("template1") as url, into(url):
            call_command("restore", str(tmp_path / "backup"), verbosity=0)
            assert not prepare._pending()
            connection.close()
    finally:
        rows.delete()
        rows.bulk_create(ours)


def test_secrets_stay_sealed_and_another_key_is_noticed(written: Path, tmp_path: Path) -> None:
    assert oct(written.stat().st_mode & 0o777) == "0o600"
    with tarfile.open(written) as archive:
        archive.extract("database", tmp_path, filter="data")
    text = subprocess.run(
        [str(backup._program("pg_restore")), "-f", "-", str(tmp_path / "database")],
        capture_output=True,
        check=True,
    ).stdout
    assert b"job1" in text
    assert SECRET.encode() not in text
    assert os.environ["TIDEGATE_SECRET_KEY"].encode() not in text
    with database("template1") as url:
        key = {"TIDEGATE_SECRET_KEY": "another-" * 10}
        done = restored(url, written, tmp_path / "t", **key)
        assert done.returncode
        assert "made with another TIDEGATE_SECRET_KEY" in done.stderr
        assert contents(url) == {}
        done = restored(url, written, tmp_path / "t", "--unverified", **key)
        assert done.returncode
        assert "TIDEGATE_SECRET_KEY_FALLBACKS" in done.stderr
        assert "1 rows" in done.stderr


def test_what_somebody_has_changed_is_not_restored(written: Path, tmp_path: Path) -> None:
    """Another database, with its hash and rows in the manifest: pg_restore would run what is in it."""
    found = backups.members(written)
    other = tmp_path / "other"
    subprocess.run(
        [
            str(PG_DUMP),
            *("--format=custom", "--table=orgs_org", "--file", str(other), "--dbname", own_url()),
        ],
        check=True,
    )
    told = {"rows": {"orgs_org": 2}, "sha256": backup_file.sha256_of(other)}
    found = {
        **backups.with_manifest(found, lambda one: one.update(told)),
        "database": other.read_bytes(),
    }
    changed = backups.write(tmp_path / "changed", found)
    with database("template1") as url:
        with into(url), pytest.raises(CannotBackUp, match="The backup was changed"):
            backup.restore(changed)
        assert contents(url) == {}


def test_all_is_checked_before_anything_is_changed(written: Path, tmp_path: Path, settings: Any) -> None:
    found = backups.members(written)
    rows = json.loads(found["manifest.json"])["rows"]
    member = f"tokenizers/sha256/{SHA256}/tokenizer.json"
    here = settings.TOKENIZERS = tmp_path / "here"
    with database("template1") as url:
        for number, (changed, said) in enumerate(
            [
                (backups.unsigned(found, rows={"x": 1}), "has not the rows"),
                (
                    backups.unsigned(found, rows={**rows, "x": 0}),
                    "has not the rows that it should have, in x",
                ),
                (backups.unsigned(found, rows={**rows, "orgs_org": 1_000}), "should have, in orgs_org"),
                ({**backups.unsigned(found), "tokenizers/../x": b""}, "something else"),
                ({**found, member: b"[]"}, "damaged: its tokenizers"),
            ]
        ):
            file = backups.write(tmp_path / str(number), changed)
            with into(url), pytest.raises(CannotBackUp, match=said):
                backup.restore(file, must_be_signed=False)
            assert contents(url) == {}
            assert not here.exists()
        other = here / "sha256" / SHA256 / "tokenizer.json"
        other.parent.mkdir(parents=True)
        other.write_bytes(b"[]")
        with into(url), pytest.raises(CannotBackUp, match="is there, and another one is in"):
            backup.restore(written)
        assert contents(url) == {}
        other.write_bytes(TOKENIZER)  # as after a try that was killed
        former = backups.write(tmp_path / "former", backups.unsigned(found))
        with into(url), pytest.raises(CannotBackUp, match="--unverified"):
            backup.restore(former)
        done = restored(url, former, here, "--unverified")
        assert done.returncode == 0, done.stderr
        assert contents(url) == contents(own_url())


def test_tokenizers_that_are_not_where_they_should_be_are_missed(
    tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tokenizer.parent.parent / ".draft").mkdir()
    (tokenizer.parent.parent / ".draft" / "tokenizer.json").touch()
    call_command("backup", str(tmp_path / "whole"))
    assert " 1 tokenizers, " in capsys.readouterr().out
    for damage in (lambda: tokenizer.write_bytes(b"[]"), lambda: shutil.rmtree(settings.TOKENIZERS)):
        damage()
        with pytest.raises(CommandError, match="1 tokenizer of the database is not in"):
            call_command("backup", str(tmp_path / "none"))
        assert not (tmp_path / "none").exists()
    call_command("backup", str(tmp_path / "without"), "--without-tokenizers")
    assert " 0 tokenizers, " in capsys.readouterr().out
    with database("template1") as url:
        done = restored(url, tmp_path / "without", tmp_path / "t")
        assert done.returncode == 0
        assert "1 tokenizer of the database is not in" in done.stderr


def test_the_client_programs_of_postgresql_will_do(
    tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Debian's postgresql-client has them: no server, and a script on the PATH that chooses one."""
    monkeypatch.setattr(binaries, "WHEELS_WITH_POSTGRES", ())
    monkeypatch.setattr(binaries, "SYSTEM_POSTGRES", (str(tmp_path / "*" / "bin"),))
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    with pytest.raises(CommandError, match=r"pg_dump of PostgreSQL \d+ or newer is not installed"):
        call_command("backup", str(tmp_path / "backup"))
    installed = tmp_path / "99" / "bin"
    installed.mkdir(parents=True)
    (installed / "pg_dump").symlink_to(PG_DUMP)
    call_command("backup", str(tmp_path / "backup"), verbosity=0)
    assert (tmp_path / "backup").stat().st_size


@contextmanager
def dumping(target: Path) -> Iterator[tuple[subprocess.Popen[bytes], psutil.Process]]:
    """A backup and its pg_dump, which waits for a table whose rows it leaves out."""
    waiting = """
        SELECT pid FROM pg_stat_activity WHERE datname = current_database()
            AND wait_event_type = 'Lock' AND query ~ '^LOCK TABLE'
    """
    with psycopg.connect(own_url()) as busy, psycopg.connect(own_url(), autocommit=True) as asking:
        busy.execute("LOCK TABLE telemetry_fresh IN ACCESS EXCLUSIVE MODE")
        running = subprocess.Popen(
            [sys.executable, "manage.py", "backup", str(target), *WITHOUT],
            cwd=PROJECT,
            env={**os.environ, "DATABASE_URL": own_url()},
        )
        try:
            wait_until("pg_dump waits", lambda: asking.execute(waiting).fetchone(), 60)
            [dump] = psutil.Process(running.pid).children()
            yield running, dump
        finally:
            running.kill()
            running.wait()


def test_a_backup_that_is_told_to_end_leaves_nothing(tmp_path: Path) -> None:
    with dumping(tmp_path / "backup") as (running, dump):
        running.terminate()
        assert running.wait(30) == 128 + signal.SIGTERM
        assert not dump.is_running()
        assert list(tmp_path.iterdir()) == []


def test_what_a_killed_backup_has_left_is_removed_by_the_next(tmp_path: Path) -> None:
    with dumping(tmp_path / "killed") as (running, dump):
        running.kill()
        running.wait()
        dump.kill()
    [left] = tmp_path.iterdir()
    with backup._drafts(tmp_path, ".backup-") as of_another:
        assert not left.exists()
        call_command("backup", str(tmp_path / "next"), *WITHOUT, verbosity=0)
        assert sorted(tmp_path.iterdir()) == [of_another, tmp_path / "next"]


def test_only_what_a_killed_run_has_left_is_removed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def folder(name: str, text: bytes | None = None) -> Path:
        (tmp_path / name).mkdir()
        if text is not None:
            (tmp_path / name / backup.RUNS).write_bytes(text)
        return tmp_path / name

    left = folder(".backup-abcd_123", backup.MARK)
    of_others = [
        folder(".backup-of-my-laptop", backup.MARK),
        folder(".backup-nothing0", b"a log of runs"),
        folder(".backup-nothing1"),
        folder(".backup-nothing2") / backup.RUNS,
        folder(".restore-nothing3", backup.MARK),
    ]
    of_others[3].mkdir()
    (tmp_path / ".backup-linked00").symlink_to(folder("elsewhere", backup.MARK))
    stuck = folder(".backup-stuck000", backup.MARK)
    (stuck / backup.RUNS).chmod(0)
    with backup._drafts(tmp_path, ".backup-") as ours:
        assert not left.exists()
        assert all(one.exists() for one in of_others)
        assert (tmp_path / "elsewhere" / backup.RUNS).exists()
    assert not ours.exists()
    if os.geteuid():
        assert stuck.exists()
        assert "Permission denied" in caplog.text


def test_runs_that_begin_and_end_at_once_leave_each_other_alone(tmp_path: Path) -> None:
    """Each looks at the folders of the others at all moments of theirs."""

    def run(_: int) -> int:
        for _ in range(100):
            with backup._drafts(tmp_path, ".backup-") as folder:
                (folder / "backup").write_bytes(b"x")
        return 1

    with ThreadPoolExecutor(4) as pool:
        assert sum(pool.map(run, range(4))) == 4
    assert list(tmp_path.iterdir()) == []


def test_where_nothing_can_be_locked_backups_are_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuses(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", refuses)
    with (
        backup._drafts(tmp_path, ".backup-") as ours,
        backup._drafts(tmp_path, ".backup-") as others,
    ):
        assert ours.exists()
        assert others.exists()
    assert "No locks available" in caplog.text


def test_what_is_damaged_is_not_restored(written: Path, tmp_path: Path) -> None:
    raw = bytearray(written.read_bytes())
    with tarfile.open(written) as archive:
        member = archive.getmember("database")
        raw[member.offset_data + member.size // 2] ^= 1
    (tmp_path / "damaged").write_bytes(raw)
    (tmp_path / "none").write_bytes(b"x" * 100)
    with database("template1") as url:
        done = restored(url, tmp_path / "damaged", tmp_path / "t")
        assert "The backup is damaged" in done.stderr
        done = restored(url, tmp_path / "none", tmp_path / "t")
        assert done.returncode
        assert "Traceback" not in done.stderr
        assert contents(url) == {}


def test_a_backup_overwrites_nothing_and_may_leave_out_numbers(written: Path, tmp_path: Path) -> None:
    with pytest.raises(CommandError, match="exists"):
        call_command("backup", str(written))
    call_command("backup", str(tmp_path / "small"), "--without-numbers", verbosity=0)
    with database("template1") as url:
        done = restored(url, tmp_path / "small", tmp_path / "t")
        assert done.returncode == 0, done.stderr
        found = contents(url)
    assert found["telemetry_fresh"] == []
    assert found["orgs_org"] == contents(own_url())["orgs_org"]
