"""`python -m workload_manager compile --folder F`: one compile job.

    F/spec.json       in:  a `CompileSpec`
    F/secrets.json    in:  `Secrets`, where it needs any
    F/progress.json   out: how far it is
    F/result.json     out: the artifact, with exit status 0
    F/error.json      out: {"reason", "sentence", "field"}, with exit status 1

SIGTERM cancels it, with exit status 143.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from kvss_agent.documents import Invalid
from kvss_agent.process.durable_file import write_durably
from workload_manager.artifact import Artifact, ArtifactStore
from workload_manager.compiler import model_files
from workload_manager.compiler.compilation import compile_engine
from workload_manager.compiler.errors import Refused
from workload_manager.compiler.spec import parse
from workload_manager.single_flight import Cancelled
from workload_manager.spec import read_secrets

log = logging.getLogger(__name__)

CANCELLED: Final = 128 + signal.SIGTERM
STORE: Final = "TIDEGATE_ARTIFACTS"
STEPS: Final = ("read the model's files", "compile")


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m workload_manager compile",
        description="Find and check what an engine needs, without starting one.",
    )
    made.add_argument("--folder", type=Path, required=True, help="of the job: its spec, and its result")
    made.add_argument(
        "--store",
        type=Path,
        default=default_store(os.environ),
        help=f"artifacts of this machine ({STORE}; by default below XDG_STATE_HOME)",
    )
    return made


def default_store(environment: Mapping[str, str]) -> Path:
    if told := environment.get(STORE):
        return Path(told)
    base = environment.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(base) / "tidegate" / "artifacts"


def main(arguments: Sequence[str]) -> int:
    options = parser().parse_args(arguments)
    folder: Path = options.folder
    ended: queue.SimpleQueue[int] = queue.SimpleQueue()  # which takes signals, as a lock would not
    cancelled = threading.Event()

    def cancel(*_: object) -> None:
        ended.put(CANCELLED)

    def work() -> None:
        ended.put(_attempt(folder, ArtifactStore(options.store), cancelled))

    before = signal.signal(signal.SIGTERM, cancel)
    try:
        # In a thread: what it waits for, such as a bucket, takes no notice of a signal.
        threading.Thread(target=work, daemon=True).start()
        return ended.get()
    finally:
        cancelled.set()
        signal.signal(signal.SIGTERM, before)


def _attempt(folder: Path, store: ArtifactStore, cancelled: threading.Event) -> int:
    try:
        artifact = run(folder, store, cancelled)
        _write(folder / "result.json", artifact)
    except Cancelled:
        return CANCELLED
    except Refused as error:
        return _failed(folder, error.reason, error.sentence, error.field)
    except Invalid as error:
        return _failed(folder, "Misconfigured", str(error))
    except OSError as error:
        return _failed(folder, "Unreadable", f"{error.filename or folder}: {error.strerror or error}.")
    except BaseException:
        log.exception("Compiling failed with an internal error")
        return _failed(folder, "InternalError", "Compiling failed; its log says why.")
    return 0


def run(folder: Path, store: ArtifactStore, cancelled: threading.Event) -> Artifact:
    """Raises Refused, Invalid, Cancelled and OSError."""
    spec = parse((folder / "spec.json").read_bytes())
    began = time.monotonic()
    _progress(folder, 0, began)
    files = None
    if spec.weights is not None:
        files = model_files.read(spec.weights, read_secrets(folder).weights)
    _progress(folder, 1, began)
    if cancelled.is_set():
        raise Cancelled
    inputs = spec.inputs(dict(files.identity) if files else {})
    made = store.get_or_make(
        inputs, lambda sha256: compile_engine(spec, files, sha256), cancelled.is_set
    )
    _progress(folder, 2, began)
    return made


def _progress(folder: Path, done: int, began: float) -> None:
    seconds = round(time.monotonic() - began, 3)
    said = {"done": done, "total": len(STEPS), "unit": "steps", "seconds": seconds}
    _write(folder / "progress.json", said)


def _failed(folder: Path, reason: str, sentence: str, field: str = "") -> int:
    sys.stderr.write(f"{reason}: {sentence}\n")
    with contextlib.suppress(OSError):  # the folder is gone, or not to be written to: it was said
        _write(folder / "error.json", {"reason": reason, "sentence": sentence, "field": field})
    return 1


def _write(path: Path, value: Any) -> None:
    write_durably(path, msgspec.json.encode(value, order="deterministic"))
