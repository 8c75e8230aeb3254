"""What an engine needs before it starts: its artifact, weights and a tokenizer, on this machine."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeAlias

from workload_manager import weights
from workload_manager.artifact import ArtifactStore
from workload_manager.compiler import model_files
from workload_manager.compiler.compilation import compile_engine
from workload_manager.compiler.errors import Refused
from workload_manager.compiler.spec import CompileSpec
from workload_manager.spec import InstanceSpec, Secrets, TokenizerSpec, WeightsSpec
from workload_manager.state import Preparing, State
from workload_manager.status import Progress
from workload_manager.tokenizers.archive import BadArchive
from workload_manager.tokenizers.store import NotStored, TokenizerStore

# Says which step it is at, and how far that is. From any thread.
Report: TypeAlias = Callable[[Preparing, Progress | None], None]

COMPILING: Final = Preparing(State.COMPILING, "Compiling", "Model and engine are checked.")
LOADING_WEIGHTS: Final = Preparing(
    State.LOADING, "LoadingWeights", "The weights are loaded and checked."
)
LOADING_TOKENIZER: Final = Preparing(State.LOADING, "LoadingTokenizer", "The tokenizer is loaded.")


class Unprepared(Exception):
    """Something is missing. It may be there at the next try."""

    def __init__(self, reason: str, sentence: str) -> None:
        super().__init__(sentence)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Stores:
    """Folders that the instances of a machine share."""

    artifacts: Path
    weights: Path
    tokenizers: Path


@dataclass(frozen=True, slots=True)
class Folders:
    weights: Path | None = None
    tokenizer: Path | None = None


def prepare(
    spec: InstanceSpec, secrets: Secrets, stores: Stores, report: Report, cancelled: threading.Event
) -> Folders:
    """Waits. Raises Unprepared, OSError, and `single_flight.Cancelled`."""
    if spec.artifact:
        _compile_if_absent(spec, spec.artifact, secrets, stores, report, cancelled)
    found = None
    if spec.weights:
        report(LOADING_WEIGHTS, None)
        found = _weights(spec.weights, secrets.weights, stores.weights, report, cancelled)
    tokenizer = None
    if spec.tokenizer:
        report(LOADING_TOKENIZER, None)
        tokenizer = _tokenizer(spec.tokenizer, stores.tokenizers)
    return Folders(found, tokenizer)


def _compile_if_absent(
    spec: InstanceSpec,
    wanted: str,
    secrets: Secrets,
    stores: Stores,
    report: Report,
    cancelled: threading.Event,
) -> None:
    """On another machine than the one that has compiled it: what can't work is refused before weights
    are brought."""
    store = ArtifactStore(stores.artifacts)
    if store.get(wanted):
        return
    report(COMPILING, None)
    job = compile_job(spec)
    try:
        files = model_files.read(spec.weights, secrets.weights) if spec.weights else None
        inputs = job.inputs(dict(files.identity) if files else {})
        store.get_or_make(inputs, lambda sha256: compile_engine(job, files, sha256), cancelled.is_set)
    except Refused as error:
        raise Unprepared(error.reason, error.sentence) from error


def compile_job(spec: InstanceSpec) -> CompileSpec:
    """What its revision was compiled for, so that the same address comes of it."""
    return CompileSpec(
        model=spec.model,
        engine=spec.engine,
        tokens_max=spec.tokens_max,
        boxes=max(1, len(spec.boxes)),
        revision=spec.weights.revision if spec.weights else "",
        weights=spec.weights,
        box_memory_bytes=spec.box_memory_bytes,
        has_cache=spec.cache is not None,
    )


def _weights(
    spec: WeightsSpec,
    credentials: Mapping[str, str],
    store: Path,
    report: Report,
    cancelled: threading.Event,
) -> Path:
    def so_far(progress: weights.Progress) -> None:
        report(LOADING_WEIGHTS, Progress(*progress))

    try:
        found = weights.prepare(spec, credentials, store, so_far, cancelled.is_set).absolute()
        if not model_files.is_mounted(spec):
            model_files.check_brought(found)
    except Refused as error:
        raise Unprepared(error.reason, error.sentence) from error
    except weights.WeightsError as error:
        raise Unprepared(f"Weights{error.reason}", error.sentence) from error
    return found


def _tokenizer(spec: TokenizerSpec, store: Path) -> Path:
    """A folder on a mount, or an upload by its hash: fetched once for a machine."""
    try:
        if spec.sha256:
            uploads = TokenizerStore(store)
            if spec.url and spec.sha256 not in uploads:
                return uploads.fetch(spec.url, spec.sha256).absolute()
            return uploads.folder(spec.sha256).absolute()
        if not spec.folder:
            raise Unprepared("TokenizerMissing", "The tokenizer has neither a folder nor an upload.")
        os.scandir(spec.folder).close()
    except (NotStored, BadArchive) as error:
        raise Unprepared("TokenizerMissing", str(error)) from error
    except OSError as error:
        why = (error.strerror or str(error)).lower()
        sentence = f"The tokenizer can't be read from {spec.folder or store}: {why}."
        raise Unprepared("TokenizerMissing", sentence) from None
    return Path(spec.folder).absolute()
