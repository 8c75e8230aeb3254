"""Archives of tokenizers: bytes of strangers to files by name, or a sentence. Pure.

Nothing is unpacked to a disk here, no name in an archive becomes a path, and no more is decompressed
than the files may have. What counts are names and bytes of the files: the same in a tar and in a zip.
"""

from __future__ import annotations

import hashlib
import io
import tarfile
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple

from telemetry.decoder import excerpt

REQUIRED: Final = "tokenizer.json"
BYTES_MAX: Final[Mapping[str, int]] = {
    REQUIRED: 128 << 20,
    "tokenizer_config.json": 16 << 20,
    "chat_template.jinja": 1 << 20,
    "special_tokens_map.json": 1 << 20,
}
ARCHIVE_BYTES_MAX: Final = 64 << 20
TOTAL_BYTES_MAX: Final = sum(BYTES_MAX.values()) + (1 << 20)  # with the headers of a tar
ENTRIES_MAX: Final = 32
HEADER_BYTES_MAX: Final = 64 << 10  # of a tar, that says more of an entry
FORMAT: Final = b"tidegate tokenizer 1\0"
_ZIP: Final = (b"PK\x03\x04", b"PK\x05\x06")
_GZIP: Final = b"\x1f\x8b"
_ZIP_ENTRY: Final = b"PK\x01\x02"
_TAR_MAGIC: Final = slice(257, 262)
_METHODS: Final = frozenset({zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED})
_ENCRYPTED: Final = 0x1
_LINK: Final = 0o120000
_KIND: Final = 0o170000

Files = Mapping[str, bytes]


class BadArchive(ValueError):
    """Why an upload is no tokenizer, in a sentence."""


class _Entry(NamedTuple):
    name: str
    size: int  # as the archive says
    content: bytes


def read(raw: bytes, bytes_max: int = ARCHIVE_BYTES_MAX) -> Files:
    """The files of a tar, a gzipped tar or a zip. Raises BadArchive."""
    if len(raw) > bytes_max:
        raise BadArchive(f"The archive has more than {bytes_max >> 20} MiB.")
    try:
        entries = list(_zipped(raw) if raw.startswith(_ZIP) else _tarred(_decompressed(raw)))
    except BadArchive:
        raise
    # All that these modules raise for input that is none: they were not written for strangers' bytes.
    except (
        tarfile.TarError,
        zipfile.BadZipFile,
        zlib.error,
        ArithmeticError,
        EOFError,
        LookupError,
        NotImplementedError,
        OSError,
        RuntimeError,
        ValueError,
    ) as error:
        raise BadArchive(
            f"The archive is damaged: {excerpt(str(error)) or type(error).__name__}."
        ) from None
    return _named(entries)


def digest(files: Files) -> str:
    """The hash of what is in a tokenizer, by which it is known."""
    hashed = hashlib.sha256(FORMAT)
    for name in sorted(files):
        hashed.update(f"{name} {len(files[name])}\n".encode())
        hashed.update(files[name])
    return hashed.hexdigest()


def written(files: Files) -> bytes:
    """The files as a tar, always the same bytes."""
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for name in sorted(files):
            told = tarfile.TarInfo(name)
            told.size = len(files[name])
            archive.addfile(told, io.BytesIO(files[name]))
    return made.getvalue()


def _named(entries: list[_Entry]) -> Files:
    """By their own names, in the root of the archive or all in one folder."""
    folders = {entry.name.rpartition("/")[0] for entry in entries}
    if len(folders) > 1 or any("/" in folder for folder in folders):
        raise BadArchive(
            "The files of a tokenizer are in the root of the archive, or all in one folder."
        )
    files: dict[str, bytes] = {}
    for entry in entries:
        files[entry.name.rpartition("/")[2]] = entry.content
    if REQUIRED not in files:
        raise BadArchive(f"The archive has no {REQUIRED}.")
    return files


def _check(name: str, size: int, seen: set[str]) -> str:
    """The name of an entry that may be in an archive, and is not yet among those seen. So all that are
    read are no more than the files may have. Raises BadArchive."""
    shown = excerpt(name)
    parts = name.removeprefix("./").split("/")
    if any(part in ("", ".", "..") for part in parts) or "\\" in name or "\0" in name:
        raise BadArchive(f"{shown} is a path out of the archive.")
    most = BYTES_MAX.get(parts[-1])
    if most is None:
        raise BadArchive(f"The archive has {shown}; it may have {', '.join(BYTES_MAX)}.")
    if size > most:
        raise BadArchive(f"{shown} has more than {most >> 20} MiB.")
    if parts[-1] in seen:
        raise BadArchive(f"The archive has {parts[-1]} twice.")
    seen.add(parts[-1])
    return "/".join(parts)


def _zipped(raw: bytes) -> Iterator[_Entry]:
    seen: set[str] = set()
    # The library makes an object of each entry first. Compressed bytes look like one once in 4 GiB.
    if raw.count(_ZIP_ENTRY) > 2 * ENTRIES_MAX:
        raise BadArchive(f"The archive has more than {ENTRIES_MAX} entries.")
    with zipfile.ZipFile(io.BytesIO(raw)) as archive:
        told = archive.infolist()
        if len(told) > ENTRIES_MAX:
            raise BadArchive(f"The archive has more than {ENTRIES_MAX} entries.")
        for one in told:
            if one.is_dir():
                continue
            if one.flag_bits & _ENCRYPTED:
                raise BadArchive(f"{excerpt(one.filename)} is encrypted.")
            if (one.external_attr >> 16) & _KIND == _LINK:
                raise BadArchive(f"{excerpt(one.filename)} is a link.")
            if one.compress_type not in _METHODS:
                raise BadArchive(
                    f"{excerpt(one.filename)} is compressed in a way that is not read here."
                )
            name = _check(one.filename, one.file_size, seen)
            with archive.open(one) as file:  # reads no more than the size that was checked
                yield _Entry(name, one.file_size, _whole(file.read(one.file_size + 1), one.file_size))


class _PlainTar(tarfile.TarInfo):
    """Without what takes long to read: maps of holes in a file, and long lists of what is said of it."""

    def _refuse(self, *_: object) -> Any:
        raise BadArchive(f"{excerpt(self.name)} is no plain file.")

    _proc_sparse = _proc_gnusparse_00 = _proc_gnusparse_01 = _proc_gnusparse_10 = _refuse

    def _proc_pax(self, archive: tarfile.TarFile) -> Any:
        self._check_header()
        return super()._proc_pax(archive)  # type: ignore[misc]

    def _proc_gnulong(self, archive: tarfile.TarFile) -> Any:
        self._check_header()
        return super()._proc_gnulong(archive)  # type: ignore[misc]

    def _check_header(self) -> None:
        if not 0 <= self.size <= HEADER_BYTES_MAX:
            raise BadArchive(f"The archive has a header with more than {HEADER_BYTES_MAX >> 10} KiB.")


def _tarred(raw: bytes) -> Iterator[_Entry]:
    seen: set[str] = set()
    if raw[_TAR_MAGIC] != b"ustar":
        raise BadArchive("The archive is no tar, gzipped tar or zip.")
    with tarfile.open(fileobj=io.BytesIO(raw), mode="r:", tarinfo=_PlainTar) as archive:
        for count, one in enumerate(archive, 1):
            if count > ENTRIES_MAX:
                raise BadArchive(f"The archive has more than {ENTRIES_MAX} entries.")
            if one.isdir():
                continue
            if not one.isreg() or one.issparse():
                raise BadArchive(f"{excerpt(one.name)} is no plain file.")
            name = _check(one.name, one.size, seen)
            file = archive.extractfile(one)
            assert file  # noqa: S101 - it is a plain file
            yield _Entry(name, one.size, _whole(file.read(one.size + 1), one.size))


def _whole(content: bytes, size: int) -> bytes:
    if len(content) != size:
        raise BadArchive("The archive is cut off.")
    return content


def _decompressed(raw: bytes) -> bytes:
    """Of a gzipped tar, as far as the files may reach."""
    if not raw.startswith(_GZIP):
        return raw
    inflate = zlib.decompressobj(wbits=31)
    made = inflate.decompress(raw, TOTAL_BYTES_MAX + 1)
    if len(made) > TOTAL_BYTES_MAX:
        raise BadArchive(f"The archive has more than {TOTAL_BYTES_MAX >> 20} MiB in it.")
    if not inflate.eof:
        raise BadArchive("The archive is cut off.")
    return made
