"""What is in the file of a backup is what was written, or nothing of it is taken."""

from __future__ import annotations

import hashlib
import io
import tarfile
from pathlib import Path
from typing import Any

import pytest

from console.shell import backup_file
from console.shell.backup_file import CannotBackUp, Manifest, extract, read_manifest, write
from telemetry.decoder import Limits
from tests.console.shell import backups

TOKENIZER = f"sha256/{'ab' * 32}/tokenizer.json"
MEMBER = f"tokenizers/{TOKENIZER}"


def sha256(raw: bytes) -> str:
    return hashlib.sha256(raw).hexdigest()


@pytest.fixture
def manifest() -> Manifest:
    tokenizers = {TOKENIZER: sha256(b"{}")}
    return Manifest(2, "0.1.0", 150_000, 1.0, ["a.1"], {"t": 1}, sha256(b"dump"), True, tokenizers)


@pytest.fixture
def written(manifest: Manifest, tmp_path: Path) -> Path:
    folder = tmp_path / "collected"
    (folder / MEMBER).parent.mkdir(parents=True)
    (folder / MEMBER).write_bytes(b"{}")
    (folder / "database").write_bytes(b"dump")
    with (tmp_path / "backup").open("wb") as file:
        write(file, manifest, folder)
    return tmp_path / "backup"


def read(file: Path, *, must_be_signed: bool = True) -> tuple[Manifest, dict[str, bytes]]:
    folder = file.with_name(f"{file.name}.extracted")
    folder.mkdir()
    with tarfile.open(file) as archive:
        manifest = read_manifest(archive, must_be_signed=must_be_signed)
        extract(archive, manifest, folder)
    found = [path for path in folder.rglob("*") if path.is_file()]
    return manifest, {str(path.relative_to(folder)): path.read_bytes() for path in found}


def test_what_was_written_is_read(written: Path, manifest: Manifest) -> None:
    assert read(written) == (manifest, {"database": b"dump", MEMBER: b"{}"})
    assert manifest.tokenizer_count == 1


def test_another_database_with_its_own_hash_is_refused(written: Path, tmp_path: Path) -> None:
    found = backups.members(written)
    found = backups.with_manifest(found, lambda one: one.update(sha256=sha256(b"other")))
    changed = backups.write(tmp_path / "changed", {**found, "database": b"other"})
    with pytest.raises(CannotBackUp, match="The backup was changed, or made with another"):
        read(changed)


def test_only_who_has_the_secret_key_or_a_former_one_signs(written: Path, settings: Any) -> None:
    former, settings.SECRET_KEY = settings.SECRET_KEY, "another-" * 10
    with (
        tarfile.open(written) as archive,
        pytest.raises(CannotBackUp, match="TIDEGATE_SECRET_KEY_FALLBACKS"),
    ):
        read_manifest(archive, must_be_signed=True)
    with tarfile.open(written) as archive:
        assert read_manifest(archive, must_be_signed=False).rows == {"t": 1}
    settings.SECRET_KEY_FALLBACKS = [former]
    assert read(written)[0].rows == {"t": 1}


@pytest.mark.parametrize("signature", [None, b"", b"0" * 64, b"0" * 65])
def test_without_a_signature_nothing_is_read(
    written: Path, tmp_path: Path, signature: bytes | None
) -> None:
    found = backups.members(written)
    del found["manifest.hmac"]
    first = {"manifest.json": found.pop("manifest.json")}
    if signature is not None:
        first["manifest.hmac"] = signature
    with pytest.raises(CannotBackUp):
        read(backups.write(tmp_path / "changed", {**first, **found}))


def test_the_former_format_is_read_only_when_that_is_asked_for(written: Path, tmp_path: Path) -> None:
    former = backups.write(tmp_path / "former", backups.unsigned(backups.members(written)))
    with tarfile.open(former) as archive, pytest.raises(CannotBackUp, match="--unverified"):
        read_manifest(archive, must_be_signed=True)
    manifest, found = read(former, must_be_signed=False)
    assert manifest.tokenizers is None
    assert found == {"database": b"dump", MEMBER: b"{}"}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"database": b"Dump"}, "damaged: its database"),
        ({MEMBER: b"[]"}, "damaged: its tokenizers"),
        ({MEMBER: None}, "damaged: it has no tokenizers"),
        ({"database": None}, "damaged: it has no database"),
        ({"tokenizers/other": b""}, "something else"),
        ({"other": b""}, "something else"),
    ],
)
def test_each_file_is_compared_with_its_hash(
    written: Path, tmp_path: Path, changes: dict[str, bytes | None], said: str
) -> None:
    found = {**backups.members(written), **changes}
    left = {name: raw for name, raw in found.items() if raw is not None}
    with pytest.raises(CannotBackUp, match=said):
        read(backups.write(tmp_path / "changed", left))


@pytest.mark.parametrize(
    "name", ["tokenizers/../../../out", "tokenizers//out", "/out", "../out", "database", "tokenizers/"]
)
def test_nothing_gets_out_of_the_folder_even_unverified(
    written: Path, tmp_path: Path, name: str
) -> None:
    former = backups.write(tmp_path / "former", backups.unsigned(backups.members(written)))
    with tarfile.open(former, "a") as archive:
        archive.addfile(tarfile.TarInfo(name), io.BytesIO())
    with pytest.raises(CannotBackUp, match="something else"):
        read(former, must_be_signed=False)
    assert not list(tmp_path.glob("**/out"))


def test_links_are_refused(written: Path, tmp_path: Path) -> None:
    former = backups.write(tmp_path / "former", backups.unsigned(backups.members(written)))
    link = tarfile.TarInfo("tokenizers/link")
    link.type, link.linkname = tarfile.SYMTYPE, "/etc"
    with tarfile.open(former, "a") as archive:
        archive.addfile(link)
    with pytest.raises(CannotBackUp, match="something else"):
        read(former, must_be_signed=False)


def test_a_manifest_that_would_not_be_read_again_is_not_written(
    manifest: Manifest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backup_file, "MANIFEST_LIMITS", Limits(100))
    file = io.BytesIO()
    with pytest.raises(CannotBackUp):
        write(file, manifest, tmp_path)
    assert not file.getvalue()
