"""Weights to a folder of this machine, whatever their source is."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import msgspec

from kvss_agent.process.durable_file import write_durably
from workload_manager.single_flight import Cancelled
from workload_manager.spec import WeightsSpec
from workload_manager.weights.download import Download
from workload_manager.weights.errors import WeightsError
from workload_manager.weights.progress import Counter, Progress
from workload_manager.weights.sources import S3, Bucket, Folder, SourceFile

THREADS: Final = 8
READ_BYTES: Final = 4 << 20


def prepare(
    spec: WeightsSpec,
    credentials: Mapping[str, str],
    store: Path,
    report: Callable[[Progress], None],
    is_cancelled: Callable[[], bool],
) -> Path:
    """The folder with the weights. `store`: of this machine, for what is brought and what was checked.

    Raises WeightsError, and Cancelled; what was brought until then is kept for the next time.
    """
    try:
        if spec.source.startswith(S3):
            return Download(Bucket(spec, credentials), store, spec.files, report, is_cancelled).run()
        return _mounted(spec, store, report, is_cancelled)
    except OSError as error:
        raise WeightsError(
            "NoSpace" if error.errno == 28 else "Unreadable",
            f"Weights can't be kept in {store}: {error.strerror or error}.",
        ) from error


def _mounted(
    spec: WeightsSpec,
    store: Path,
    report: Callable[[Progress], None],
    is_cancelled: Callable[[], bool],
) -> Path:
    """On a mount nothing is copied. Hashes that are given are checked once for a version of a file."""
    folder = Folder(Path(spec.source))
    found = {one.name: one for one in folder.files()}
    if missing := sorted(spec.files.keys() - found.keys()):
        raise WeightsError("NotFound", f"{folder.path} has no {', '.join(missing[:5])}.")
    note = store / "checked" / _note_name(folder.path, [found[name] for name in spec.files], spec.files)
    if spec.files and not note.exists():
        check_hashes(folder.path, spec.files, [found[name] for name in spec.files], report, is_cancelled)
        note.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_durably(note, b"")
    return folder.path


def _note_name(path: Path, files: Sequence[SourceFile], hashes: Mapping[str, str]) -> str:
    said = msgspec.json.encode([str(path), sorted(files), sorted(hashes.items())])
    return hashlib.sha256(said).hexdigest()


def check_hashes(
    folder: Path,
    hashes: Mapping[str, str],
    files: Sequence[SourceFile],
    report: Callable[[Progress], None],
    is_cancelled: Callable[[], bool],
) -> None:
    """Read these files whole, and compare. Raises WeightsError, Cancelled and OSError."""
    counter = Counter(report, sum(one.size for one in files))

    def of(name: str) -> str:
        digest = hashlib.sha256()
        with (folder / name).open("rb") as file:
            while raw := file.read(READ_BYTES):
                if is_cancelled():
                    raise Cancelled
                digest.update(raw)
                counter.add(len(raw))
        return digest.hexdigest()

    with ThreadPoolExecutor(THREADS) as threads:
        for name, is_so in zip(hashes, threads.map(of, hashes), strict=True):
            if not secrets.compare_digest(hashes[name], is_so):
                raise WeightsError(
                    "Damaged",
                    f"{folder / name} has the SHA-256 {is_so[:16]}…, and should have "
                    f"{hashes[name][:16]}….",
                )
