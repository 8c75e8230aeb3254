"""A backup is of one moment, has everything, and is restored into an empty database or not at all."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import psycopg
import pytest
from django.core.management import call_command
from django.core.management.base import CommandError
from django.db import connection, transaction
from django.utils import timezone
from psycopg import sql

from console.accounts.principal import SYSTEM
from console.audit.services import Subject, record
from console.environment import PROJECT
from console.fleet.models import Driver
from console.shell import backup
from tests.conftest import People
from tests.prepared import database

pytestmark = [pytest.mark.slow, pytest.mark.django_db(transaction=True)]

SECRET = "a-token-that-nobody-may-read"
SHA256 = "ab" * 32


@pytest.fixture
def tokenizer(settings: Any, tmp_path: Path) -> Path:
    settings.TOKENIZERS = tmp_path / "tokenizers"
    file: Path = settings.TOKENIZERS / "sha256" / SHA256 / "tokenizer.json"
    file.parent.mkdir(parents=True)
    file.write_text("{}")
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


def restored(url: str, file: Path, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "manage.py", "restore", str(file)],
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
        done = restored(url, written, tmp_path / "t", TIDEGATE_SECRET_KEY="another-" * 10)
        assert done.returncode
        assert "TIDEGATE_SECRET_KEY_FALLBACKS" in done.stderr
        assert "1 rows" in done.stderr


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
