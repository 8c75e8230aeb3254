"""Backups: one file with all that PostgreSQL has and the uploaded tokenizers, and back from it.

`backup_file` reads and writes it. Secrets in it stay sealed: without TIDEGATE_SECRET_KEY, which is not
in it, nobody can open them. Redis is in no backup: what it has can be told again.
"""

from __future__ import annotations

import fcntl
import filecmp
import logging
import os
import re
import shutil
import stat
import subprocess
import tarfile
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import psycopg
from django.conf import settings
from django.db import connection
from psycopg import sql
from psycopg.conninfo import make_conninfo

from console.database_address import parse
from console.shell import backup_file
from console.shell.backup_file import DATABASE, FORMAT, TOKENIZERS, CannotBackUp, Manifest
from console.shell.sealed import CannotUnseal, sealed_rows
from console.stack.binaries import postgres_programs
from telemetry.decoder import excerpt
from telemetry.units import counted
from workload_manager.tokenizers import TokenizerStore

log = logging.getLogger(__name__)

# Numbers of every ten seconds, minute and hour: most of the bytes, and not what a console needs to work.
NUMBERS: Final = ("telemetry_fresh", "telemetry_10s*", "telemetry_1m*", "telemetry_1h*")
# How pg_restore begins and ends the rows of a table, each of which is one line.
_COPY: Final = re.compile(rb'COPY public\.(?:"([^"]+)"|(\w+)) .*FROM stdin;\n')
_COPY_END: Final = b"\\.\n"
RUNS: Final = "runs"  # in a folder of drafts: see `_marked`
MARK: Final = b"Tidegate is writing or reading a backup.\n"


def back_up(target: Path, *, has_numbers: bool = True, has_tokenizers: bool = True) -> Manifest:
    """Write a backup, of one moment, to a file that only this user can read. Processes may go on
    meanwhile. Raises CannotBackUp, also where tokenizers are missing that the database knows."""
    if target.exists():
        raise CannotBackUp(f"{target} exists. Name a file that does not.")
    with _sentences(), _drafts(target.parent, ".backup-") as folder:
        draft = folder / "backup"
        manifest = _collect(folder, has_numbers=has_numbers, has_tokenizers=has_tokenizers)
        with backup_file.created(draft) as file:
            backup_file.write(file, manifest, folder)
            file.flush()
            os.fsync(file.fileno())
        os.link(draft, target)  # all of it or nothing, and over nobody's file
    return manifest


def restore(source: Path, *, must_be_signed: bool = True) -> Manifest:
    """Fill an empty database from a backup. Raises CannotBackUp.

    All of the file is checked before anything is changed. Tokenizers come first: without the database
    nothing reads them, and a second try finds them there. The database then has all of it, or nothing.
    """
    with _sentences(), tarfile.open(source) as archive:
        manifest = backup_file.read_manifest(archive, must_be_signed=must_be_signed)
        _check_fits(manifest)
        with _drafts(source.parent, ".restore-") as folder:
            backup_file.extract(archive, manifest, folder)
            _check_rows(folder / DATABASE, manifest)
            _restore_tokenizers(folder / TOKENIZERS)
            _run(
                "pg_restore",
                *("--single-transaction", "--exit-on-error", "--no-owner", "--no-privileges"),
                *("--dbname", _address(), str(folder / DATABASE)),
            )
        connection.close()
    return manifest


def missing_tokenizers() -> int:
    """How many tokenizers the database knows whose files are not there, or are damaged."""
    with psycopg.connect(_address(with_password=True)) as reading:
        return len(_missing(reading, settings.TOKENIZERS))


def sealed_with_another_key() -> int:
    """How many rows have a secret that can't be opened with the secret keys of now."""
    found = 0
    for rows, names in sealed_rows():
        for key in rows.values_list("pk", flat=True):
            try:
                rows.only("pk", *names).get(pk=key)
            except CannotUnseal:
                found += 1
    return found


# Inside


@contextmanager
def _drafts(parent: Path, prefix: str) -> Iterator[Path]:
    """A folder that only this user can read, and is gone at the end. Those of runs that were killed are
    removed: each has a copy of the database."""
    name = re.compile(re.escape(prefix) + "[a-z0-9_]{8}")  # as mkdtemp makes them
    for folder in parent.glob(f"{prefix}*"):
        if name.fullmatch(folder.name):
            try:
                _remove_if_left(folder)
            except FileNotFoundError:
                pass  # its run has ended meanwhile, or it is another one's
            except OSError as error:
                log.warning("Drafts that may be of a killed backup are not removed: %s", error)
    ours = Path(tempfile.mkdtemp(dir=parent, prefix=prefix))
    with ExitStack() as mark:  # locked until the folder is gone
        try:
            mark.enter_context(_marked(ours))
            yield ours
        finally:
            shutil.rmtree(ours)


def _remove_if_left(folder: Path) -> None:
    """Remove a folder of drafts, unless it is of a run that is running, or another user's, or something
    else. Raises OSError."""
    mark, about = folder / RUNS, folder.lstat()
    is_ours = stat.S_ISDIR(about.st_mode) and about.st_uid == os.geteuid()
    if is_ours and stat.S_ISREG(mark.lstat().st_mode):
        with mark.open("rb") as file, suppress(BlockingIOError):
            if file.read(len(MARK) + 1) == MARK:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder)


@contextmanager
def _marked(folder: Path) -> Iterator[None]:
    """Lock a file in a folder of drafts, by which others see that its run is running. It has its name
    only once it is locked. Without locks, as on some network file systems, there is none."""
    draft = folder / f".{RUNS}"
    with draft.open("wb") as file:
        file.write(MARK)
        file.flush()
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            log.warning("Remove %s by hand if this run is killed: it can't be locked: %s", folder, error)
        else:
            draft.rename(folder / RUNS)
        yield


def _collect(folder: Path, *, has_numbers: bool, has_tokenizers: bool) -> Manifest:
    """Put the database and the files of tokenizers, of one moment, into a folder."""
    dump = folder / DATABASE
    with psycopg.connect(_address(with_password=True)) as reading:
        reading.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        [snapshot] = reading.execute("SELECT pg_export_snapshot()").fetchone() or [""]
        # Before the dump, which may take long: they may be deleted any time.
        tokenizers = _collect_tokenizers(reading, folder / TOKENIZERS) if has_tokenizers else {}
        # Counted first: what was read is locked until the end, so no day of numbers is dropped.
        names = [name for name in _tables(reading) if has_numbers or not _is_number(name)]
        rows = {name: _count(reading, name) for name in names}
        left_out = [] if has_numbers else [f"--exclude-table-data={name}" for name in NUMBERS]
        _run(
            "pg_dump",
            *("--format=custom", "--no-owner", "--no-privileges", f"--snapshot={snapshot}"),
            *("--file", str(dump), "--dbname", _address(), *left_out),
        )
        migrations = [
            f"{app}.{name}"
            for app, name in reading.execute("SELECT app, name FROM django_migrations ORDER BY id")
        ]
        version = reading.info.server_version
    return Manifest(
        FORMAT,
        settings.VERSION,
        version,
        time.time(),
        migrations,
        rows,
        backup_file.sha256_of(dump),
        has_numbers,
        tokenizers,
    )


def _collect_tokenizers(reading: psycopg.Connection[Any], folder: Path) -> dict[str, str]:
    """Copy them, since others may change them. Returns SHA-256 by path. Raises CannotBackUp."""
    found = {}
    for path in sorted(settings.TOKENIZERS.rglob("*")):
        relative = path.relative_to(settings.TOKENIZERS)
        is_draft = any(part.startswith(".") for part in relative.parts)
        if path.is_file() and not path.is_symlink() and not is_draft:
            copy = folder / relative
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, copy)
            found[str(relative)] = backup_file.sha256_of(copy)
    if missing := _missing(reading, folder):
        raise CannotBackUp(
            f"{counted(len(missing), 'tokenizer of the database is', 'tokenizers of the database are')} "
            f"not in {settings.TOKENIZERS}, or damaged: {missing[0][:16]}…. Set TIDEGATE_TOKENIZERS_DIR "
            "to the folder that webs write, or leave all tokenizers out with --without-tokenizers."
        )
    return found


def _missing(reading: psycopg.Connection[Any], folder: Path) -> list[str]:
    store = TokenizerStore(folder)
    known = reading.execute("SELECT DISTINCT sha256 FROM workloads_tokenizer ORDER BY sha256")
    return [sha256 for [sha256] in known if sha256 not in store]


def _is_number(table: str) -> bool:
    return any(table.startswith(name[:-1]) if name.endswith("*") else table == name for name in NUMBERS)


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


def _check_rows(dump: Path, manifest: Manifest) -> None:
    """Raises CannotBackUp unless the dump has the rows that the manifest counts. Runs nothing of it."""
    rows: Counter[str] = Counter()
    with tempfile.TemporaryFile() as errors:
        reading = subprocess.Popen(
            [str(_program("pg_restore")), "--data-only", "--file=-", str(dump)],
            stdout=subprocess.PIPE,
            stderr=errors,
        )
        table = ""
        with reading:
            for line in reading.stdout or ():
                if table and line == _COPY_END:
                    table = ""
                elif table:
                    rows[table] += 1
                elif begun := _COPY.fullmatch(line):
                    table = (begun[1] or begun[2]).decode()
                    rows[table] += 0
        if reading.returncode:
            errors.seek(0)
            raise CannotBackUp(_failure("pg_restore", errors.read().decode(errors="replace")))
    if different := sorted({name for name, _ in rows.items() ^ manifest.rows.items()}):
        raise CannotBackUp(
            "The backup is damaged: its database has not the rows that it should have, in "
            f"{excerpt(', '.join(different))}."
        )


def _restore_tokenizers(folder: Path) -> None:
    """Put files where they belong, unless they are there. Raises CannotBackUp before any is written."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    targets = {path: settings.TOKENIZERS / path.relative_to(folder) for path in files}
    for path, target in targets.items():
        if target.exists() and not filecmp.cmp(path, target, shallow=False):
            raise CannotBackUp(f"{target} is there, and another one is in the backup. Move it away.")
    for path, target in targets.items():
        if not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            draft = target.with_name(f".{target.name}.restored")
            shutil.copyfile(path, draft)
            draft.rename(target)


def _tables(reading: psycopg.Connection[Any]) -> list[str]:
    found = reading.execute(
        "SELECT relname FROM pg_class WHERE relkind = 'r' AND relnamespace = 'public'::regnamespace "
        "ORDER BY relname"
    )
    return [name for [name] in found]


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
        raise CannotBackUp(_failure(program, done.stderr))


def _failure(program: str, said: str) -> str:
    lines = said.strip().splitlines()
    return f"{program} failed: {lines[-1] if lines else 'it does not say why'}"


def _program(name: str) -> Path:
    """Of the server's version, else of the next newer one: older programs do not read newer servers, and
    newer ones may write what older servers do not take."""
    with psycopg.connect(_address(with_password=True)) as asking:
        major = asking.info.server_version // 10_000
    found = [program for program in postgres_programs(name) if program.version[0] >= major]
    if found:
        return min(found, key=lambda program: program.version).path
    raise CannotBackUp(
        f"{name} of PostgreSQL {major} or newer is not installed. It comes with PostgreSQL's client "
        f"programs; on Debian: apt install postgresql-client-{major}"
    )


@contextmanager
def _sentences() -> Iterator[None]:
    try:
        yield
    except (OSError, UnicodeError, tarfile.TarError, psycopg.Error) as error:
        raise CannotBackUp(f"It can't be done: {error}".strip()) from error
