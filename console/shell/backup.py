"""Backups: one file with all that PostgreSQL has and the uploaded tokenizers, and back from it.

The file is a tar of `manifest.json`, `database` (of pg_dump) and `tokenizers/…`. Secrets in it stay
sealed: without TIDEGATE_SECRET_KEY, which is not in it, nobody can open them. Redis is in no backup:
what it has can be told again.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import subprocess
import tarfile
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, Final

import psycopg
from django.apps import apps
from django.conf import settings
from django.db import connection
from psycopg import sql
from psycopg.conninfo import make_conninfo

from console.database_address import parse
from console.shell.sealed import CannotUnseal, SealedBytes
from console.stack.binaries import postgres_installations
from telemetry.decoder import Limits, Malformed, decode

FORMAT: Final = 1
MANIFEST: Final = "manifest.json"
DATABASE: Final = "database"
TOKENIZERS: Final = "tokenizers"
MANIFEST_LIMITS: Final = Limits(4 << 20)
PIECE_BYTES: Final = 1 << 20
# Numbers of every ten seconds, minute and hour: most of the bytes, and not what a console needs to work.
NUMBERS: Final = ("telemetry_fresh", "telemetry_10s*", "telemetry_1m*", "telemetry_1h*")


class CannotBackUp(Exception):
    """Why there is no backup, or nothing was restored: a sentence."""


@dataclass(frozen=True)
class Manifest:
    """What a backup says of itself."""

    format: int
    tidegate: str
    postgres: int
    at: float
    migrations: list[str]
    rows: dict[str, int]  # by table, at the moment of the backup
    sha256: str  # of `database`
    has_numbers: bool


def back_up(target: Path, *, has_numbers: bool = True) -> Manifest:
    """Write a backup, of one moment, to a file that only this user can read. Processes may go on
    meanwhile. Raises CannotBackUp."""
    if target.exists():
        raise CannotBackUp(f"{target} exists. Name a file that does not.")
    with _sentences(), tempfile.TemporaryDirectory(dir=target.parent, prefix=".backup-") as folder:
        dump, draft = Path(folder, DATABASE), Path(folder, "backup")
        manifest = _dump(dump, has_numbers=has_numbers)
        with _created(draft) as file:
            with tarfile.open(fileobj=file, mode="w") as archive:
                _add_text(archive, MANIFEST, json.dumps(asdict(manifest), indent=1))
                archive.add(dump, DATABASE, filter=_anonymous)
                for path in _tokenizer_files():
                    name = f"{TOKENIZERS}/{path.relative_to(settings.TOKENIZERS)}"
                    archive.add(path, name, recursive=False, filter=_anonymous)
            file.flush()
            os.fsync(file.fileno())
        os.link(draft, target)  # all of it or nothing, and over nobody's file
    return manifest


def restore(source: Path) -> Manifest:
    """Fill an empty database from a backup. All of it is there afterwards, or nothing. Raises
    CannotBackUp."""
    with _sentences(), tarfile.open(source) as archive:
        manifest = _manifest(archive)
        _check_fits(manifest)
        with tempfile.TemporaryDirectory(dir=source.parent, prefix=".restore-") as folder:
            dump = Path(folder, DATABASE)
            _extract(archive, dump, manifest.sha256)
            _run(
                "pg_restore",
                *("--single-transaction", "--exit-on-error", "--no-owner", "--no-privileges"),
                *("--dbname", _address(), str(dump)),
            )
        connection.close()
        missing = {
            table: count for table, count in manifest.rows.items() if _counts([table])[table] != count
        }
        if missing:
            raise CannotBackUp(f"Rows are missing after it was restored: {', '.join(sorted(missing))}.")
        _restore_tokenizers(archive)
    return manifest


def sealed_with_another_key() -> int:
    """How many rows have a secret that can't be opened with the secret keys of now."""
    found = 0
    for model in apps.get_models():
        fields = model._meta.fields  # noqa: SLF001
        names = [field.name for field in fields if isinstance(field, SealedBytes)]
        if names:
            for key in model._default_manager.values_list("pk", flat=True).order_by("pk"):  # noqa: SLF001
                try:
                    model._default_manager.only("pk", *names).get(pk=key)  # noqa: SLF001
                except CannotUnseal:
                    found += 1
    return found


# Inside


def _dump(target: Path, *, has_numbers: bool) -> Manifest:
    """The database and the counts of its rows, of the same moment."""
    with psycopg.connect(_address(with_password=True)) as reading:
        reading.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        [snapshot] = reading.execute("SELECT pg_export_snapshot()").fetchone() or [""]
        left_out = [] if has_numbers else [f"--exclude-table-data={name}" for name in NUMBERS]
        _run(
            "pg_dump",
            *("--format=custom", "--no-owner", "--no-privileges", f"--snapshot={snapshot}"),
            *("--file", str(target), "--dbname", _address(), *left_out),
        )
        tables = _tables(reading)
        rows = {table: _count(reading, table) for table in tables}
        if not has_numbers:
            rows = {name: n for name, n in rows.items() if not _is_number(name)}
        migrations = [
            f"{app}.{name}"
            for app, name in reading.execute("SELECT app, name FROM django_migrations ORDER BY id")
        ]
        version = reading.info.server_version
    with target.open("rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    return Manifest(
        FORMAT, settings.VERSION, version, time.time(), migrations, rows, sha256, has_numbers
    )


def _is_number(table: str) -> bool:
    return any(table.startswith(name[:-1]) if name.endswith("*") else table == name for name in NUMBERS)


def _manifest(archive: tarfile.TarFile) -> Manifest:
    first = archive.next()
    if first is None or first.name != MANIFEST or first.size > MANIFEST_LIMITS.bytes_max:
        raise CannotBackUp("It is no backup of Tidegate.")
    file = archive.extractfile(first)
    try:
        found = decode(file.read() if file else b"", Manifest, MANIFEST_LIMITS)
    except Malformed as error:
        raise CannotBackUp(f"It is no backup of Tidegate: {error}") from None
    if found.format != FORMAT:
        raise CannotBackUp(f"It is a backup of format {found.format}; this version reads {FORMAT}.")
    return found


def _check_fits(manifest: Manifest) -> None:
    with psycopg.connect(_address(with_password=True)) as asking:
        if tables := _tables(asking):
            raise CannotBackUp(
                f"The database is not empty: it has {len(tables)} tables. Restore into an empty one, "
                "and point DATABASE_URL to it."
            )
        if asking.info.server_version // 10_000 < manifest.postgres // 10_000:
            raise CannotBackUp(
                f"The backup is of PostgreSQL {manifest.postgres // 10_000}, and DATABASE_URL names "
                f"an older one, {asking.info.server_version // 10_000}."
            )
    from django.db.migrations.loader import MigrationLoader

    migrations = MigrationLoader(None).disk_migrations
    replaced = {name for one in migrations.values() for name in one.replaces}
    known = {f"{app}.{name}" for app, name in {*migrations, *replaced}}
    if unknown := [name for name in manifest.migrations if name not in known]:
        raise CannotBackUp(
            f"The backup is of Tidegate {manifest.tidegate}, which is newer than this one "
            f"({settings.VERSION}): it has the migration {unknown[0]}. Install that version."
        )


def _extract(archive: tarfile.TarFile, target: Path, sha256: str) -> None:
    member = archive.next()
    file = archive.extractfile(member) if member and member.name == DATABASE else None
    if file is None:
        raise CannotBackUp("The backup has no database in it.")
    digest = hashlib.sha256()
    with _created(target) as into:
        while piece := file.read(PIECE_BYTES):
            digest.update(piece)
            into.write(piece)
    if digest.hexdigest() != sha256:
        raise CannotBackUp("The backup is damaged: its database is not what was written.")


def _restore_tokenizers(archive: tarfile.TarFile) -> None:
    """Files are named by the hash of what is in them, so one that is there is the same."""
    while member := archive.next():
        path = Path(member.name)
        if path.parts[:1] != (TOKENIZERS,) or ".." in path.parts or not member.isreg():
            raise CannotBackUp(f"The backup has something else in it: {member.name[:200]}")
        target = settings.TOKENIZERS.joinpath(*path.parts[1:])
        file = archive.extractfile(member)
        if target.exists() or file is None:
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        draft = target.with_name(f".{target.name}.restored")
        with draft.open("wb") as into:
            shutil.copyfileobj(file, into, PIECE_BYTES)
        draft.rename(target)


def _tokenizer_files() -> Iterator[Path]:
    if settings.TOKENIZERS.is_dir():
        for path in sorted(settings.TOKENIZERS.rglob("*")):
            if path.is_file() and not path.is_symlink() and not path.name.startswith("."):
                yield path


def _tables(reading: psycopg.Connection[Any]) -> list[str]:
    found = reading.execute(
        "SELECT relname FROM pg_class WHERE relkind = 'r' AND relnamespace = 'public'::regnamespace "
        "ORDER BY relname"
    )
    return [name for [name] in found]


def _counts(tables: list[str]) -> Mapping[str, int]:
    with psycopg.connect(_address(with_password=True)) as reading:
        return {table: _count(reading, table) for table in tables}


def _count(reading: psycopg.Connection[Any], table: str) -> int:
    found = reading.execute(sql.SQL("SELECT count(*) FROM {}").format(sql.Identifier(table))).fetchone()
    return int(found[0]) if found else 0


def _parameters() -> dict[str, str]:
    given = parse(settings.ENVIRONMENT.database_url)
    return {**given, "dbname": connection.settings_dict["NAME"]}


def _address(*, with_password: bool = False) -> str:
    """Without the password, which everybody could read on the command line."""
    given = _parameters()
    if not with_password:
        given.pop("password", None)
    return make_conninfo("", **given)


def _run(program: str, *arguments: str) -> None:
    environment = {**os.environ, "PGPASSWORD": _parameters().get("password", "")}
    done = subprocess.run(
        [str(_program(program)), *arguments],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        said = done.stderr.strip().splitlines()
        raise CannotBackUp(f"{program} failed: {said[-1] if said else 'it does not say why'}")


def _program(name: str) -> Path:
    """Of the server's version, else of the next newer one: older programs do not read newer servers, and
    newer ones may write what older servers do not take."""
    with psycopg.connect(_address(with_password=True)) as asking:
        major = asking.info.server_version // 10_000
    found = [
        (installation.version, installation.directory / name)
        for installation in postgres_installations()
        if installation.major >= major and (installation.directory / name).is_file()
    ]
    if found:
        return min(found)[1]
    raise CannotBackUp(
        f"{name} of PostgreSQL {major} or newer is not installed. It comes with PostgreSQL's programs."
    )


def _add_text(archive: tarfile.TarFile, name: str, text: str) -> None:
    member = tarfile.TarInfo(name)
    member.size, member.mode = len(text.encode()), 0o600
    archive.addfile(member, io.BytesIO(text.encode()))


def _anonymous(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    return member


def _created(path: Path) -> IO[bytes]:
    """A new file that only this user can read."""
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb")


@contextmanager
def _sentences() -> Iterator[None]:
    try:
        yield
    except (OSError, tarfile.TarError, psycopg.Error) as error:
        raise CannotBackUp(f"It can't be done: {error}".strip()) from error
