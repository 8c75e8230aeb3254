"""Artifacts: what a compile job makes, addressed by the hash of what it was made from.

    store = ArtifactStore(folder)
    store.get_or_make(inputs, make)      # any number of processes at once: one of them makes it
    store.get(sha256)

A file is written whole or not at all, and has a checksum of its own: one that is damaged is made anew.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from kvss_agent.desired import Document
from kvss_agent.documents import Invalid, decode
from kvss_agent.process.durable_file import write_durably
from swdriver_shim.desired import GroupSpec
from workload_manager.single_flight import alone
from workload_manager.spec import Sha256, Text

log = logging.getLogger(__name__)

FORMAT: Final = 1  # of artifacts: another number compiles everything anew
FILE_BYTES_MAX: Final = 8 << 20
Sentence = Annotated[str, Meta(max_length=1000)]
Bytes = Annotated[int, Meta(ge=0)]


class LayoutFacts(Document, frozen=True, omit_defaults=True):
    """KV as far as it is known without an engine: groups with the bytes per token of each shard.

    `is_final`: the driver will report exactly this. `open_questions`: why not, where it may not; then
    what the driver reports decides, and sizes here are for planning. `computed_with`: what else decides
    which bytes a prompt has; they share a cache only with bytes of the same."""

    groups: tuple[GroupSpec, ...]
    is_final: bool
    unit_tokens: int | None = None
    kv_dtype: Text = ""
    open_questions: tuple[Sentence, ...] = ()
    computed_with: tuple[Sentence, ...] = ()

    @property
    def bytes_per_token(self) -> int:
        """Of all groups and shards: of a token that no window has left behind."""
        return sum(sum(group.bytes_per_token) for group in self.groups)


class MemoryFacts(Document, frozen=True, omit_defaults=True):
    """What an instance needs. `weights_bytes`: None where they are not known. `prompt_bytes`: the KV of
    the longest prompt with its answer."""

    weights_bytes: Bytes | None
    prompt_bytes: Bytes | None
    workers: Annotated[int, Meta(ge=1)] = 1  # over which weights and KV are divided


class Artifact(Document, frozen=True, omit_defaults=True):
    """`configuration`: of the model and the engine, resolved. `layout`: None where nothing is known
    without the engine; `notes` say why, and what else is worth knowing."""

    sha256: Sha256
    inputs: dict[str, Any]
    configuration: dict[str, Any]
    memory: MemoryFacts
    layout: LayoutFacts | None = None
    notes: tuple[Sentence, ...] = ()
    format: int = FORMAT


_DECODER: Final = msgspec.json.Decoder(Artifact)


def address(inputs: Mapping[str, Any]) -> str:
    """The hash of these inputs, whatever the order of their fields."""
    canonical = msgspec.json.encode({"format": FORMAT, "inputs": inputs}, order="sorted")
    return hashlib.sha256(canonical).hexdigest()


class ArtifactStore:
    """A folder that any number of processes of a machine share."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "sha256"

    def get(self, sha256: str) -> Artifact | None:
        """None if there is none, or if it is damaged. Raises OSError."""
        try:
            raw = self._file(sha256).read_bytes()
        except FileNotFoundError:
            return None
        checksum, _, body = raw.partition(b"\n")
        if hashlib.sha256(body).hexdigest().encode() != checksum:
            log.warning("Artifact %s is damaged: it is made anew", sha256)
            return None
        try:
            found = decode(body, _DECODER)
        except Invalid as error:  # of another version
            log.warning("Artifact %s can't be read: %s", sha256, error)
            return None
        return found if found.sha256 == sha256 == address(found.inputs) else None

    def put(self, artifact: Artifact) -> None:
        """Raises OSError."""
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        body = msgspec.json.encode(artifact, order="deterministic")
        checksum = hashlib.sha256(body).hexdigest().encode()
        write_durably(self._file(artifact.sha256), checksum + b"\n" + body)

    def get_or_make(
        self,
        inputs: Mapping[str, Any],
        make: Callable[[str], Artifact],
        is_cancelled: Callable[[], bool] = lambda: False,
    ) -> Artifact:
        """The artifact of these inputs. Of all processes that want it at once, one makes it; should that
        one end without it, the next does. Raises Cancelled, OSError, and what `make` raises."""
        sha256 = address(inputs)
        if found := self.get(sha256):
            return found
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with alone(self._folder / f".{sha256}.lock", is_cancelled):
            if found := self.get(sha256):
                return found
            made = make(sha256)
            if made.sha256 != sha256:
                raise ValueError("an artifact has the address of its inputs")
            self.put(made)
            return made

    def _file(self, sha256: str) -> Path:
        return self._folder / f"{sha256}.json"
