"""What a manager is told: one document for each instance, which the Cluster Server brings.

    replica    a place of a workload, by number: what clients' requests are sent to. It keeps its
               driver, and so its cache, over rollouts
    instance   one manager and its engine, which serve a replica for a while
    artifact   what a compile job made of a model and an engine's arguments; see `artifact`

Secrets are not in it: the server hands them over apart (`Secrets`).
"""

from __future__ import annotations

import pathlib
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta, field

from kvss_agent.desired import Document, Name
from kvss_agent.documents import Invalid, decode, whole

ARGUMENTS_MAX: Final = 256
FILES_MAX: Final = 1000  # whose hashes are told
PROMPT_TOKENS_MAX: Final = 1 << 24
VOCABULARY_MAX: Final = 1 << 20
PRINTED: Final = whole(r"^[^\x00-\x1f\x7f\ud800-\udfff]*$")

Text = Annotated[str, Meta(max_length=500, pattern=PRINTED)]
Argument = Annotated[str, Meta(max_length=4096, pattern=PRINTED)]
Path = Annotated[str, Meta(min_length=1, max_length=4096, pattern=PRINTED)]
Url = Annotated[str, Meta(pattern=whole(r"^https?://[^\s/?#@]+(/[^\s?#]*)?$"), max_length=500)]
Sha256 = Annotated[str, Meta(pattern=whole(r"^[0-9a-f]{64}$"))]
Variable = Annotated[str, Meta(pattern=whole(r"^[A-Z_][A-Z0-9_]*$"), max_length=100)]
Seconds = Annotated[float, Meta(gt=0, le=7 * 24 * 3600)]

EngineKind = Literal["emulator", "vllm", "sglang", "command"]


class EmulatorSpec(Document, frozen=True, omit_defaults=True):
    """The engine that computes nothing, and takes the time that the model would take: seconds of a
    prompt follow from parameters and speed, as `swdriver_shim.adapters.wafer` has it."""

    domains: Annotated[int, Meta(ge=1, le=64)] = 4  # of the box, each with a shard for each group
    bytes_per_token: Annotated[int, Meta(ge=1, le=1 << 20)] = 720  # of one shard
    window_tokens: Annotated[int, Meta(ge=0, le=1 << 24)] = 0  # of the second group; 0: there is none
    parameters: Annotated[float, Meta(gt=0, le=1e14)] = 8e9
    operations_per_second: Annotated[float, Meta(gt=0, le=1e20)] = 1e15
    answer_tokens_per_second: Annotated[float, Meta(gt=0, le=1e6)] = 400.0
    answer_tokens_below: Annotated[int, Meta(ge=0, le=VOCABULARY_MAX)] = 0  # 0: of English words


class EngineSpec(Document, frozen=True, omit_defaults=True):
    """An engine and how it is started. `arguments` go to its command line, as they are. `command`: for
    kind `command`, the whole command line of an OpenAI server, with `{port}`, `{weights}` and
    `{tokenizer}` to be put in."""

    kind: EngineKind
    arguments: Annotated[tuple[Argument, ...], Meta(max_length=ARGUMENTS_MAX)] = ()
    command: Annotated[tuple[Argument, ...], Meta(max_length=ARGUMENTS_MAX)] = ()
    environment: dict[Variable, Argument] = field(default_factory=dict)
    emulator: EmulatorSpec | None = None
    start_seconds: Seconds = 600.0  # until it answers, at most


class WeightsSpec(Document, frozen=True, omit_defaults=True):
    """Where the weights are: a folder on a mount, or `s3://bucket/prefix`. `revision`: of the model, by
    which engines share KV. `files`: hashes by path, of those that are checked."""

    source: Path
    revision: Text = ""
    endpoint: Url | None = None  # of an S3 server that is not Amazon's
    files: Annotated[dict[Path, Sha256], Meta(max_length=FILES_MAX)] = field(default_factory=dict)


class TokenizerSpec(Document, frozen=True, omit_defaults=True):
    """A folder on a mount, or an upload: the hash of its archive, and where it is fetched from."""

    folder: Annotated[str, Meta(max_length=4096, pattern=PRINTED)] = ""
    sha256: Sha256 | None = None
    url: Url | None = None


class CacheSpec(Document, frozen=True, omit_defaults=True):
    """The console that its driver joins, and the driver's name, which belongs to the replica.

    `telemetry`: where the driver tells its numbers and its cache map, without a password.
    An instance whose driver's identity another one has waits for it, and has no cache until then."""

    console: Url
    driver: Name
    telemetry: Annotated[str, Meta(max_length=500, pattern=PRINTED)] | None = None
    ca: Annotated[str, Meta(max_length=4096)] | None = None  # a file
    plain_console: bool = False


class InstanceSpec(Document, frozen=True, omit_defaults=True):
    """Of one instance."""

    workload: Name
    replica: Name
    instance: Name
    revision: Annotated[int, Meta(ge=1)]
    model: Text  # as clients name it
    engine: EngineSpec
    tokens_max: Annotated[int, Meta(ge=1, le=PROMPT_TOKENS_MAX)]
    weights: WeightsSpec | None = None
    tokenizer: TokenizerSpec | None = None
    artifact: Sha256 | None = None
    cache: CacheSpec | None = None
    boxes: tuple[Name, ...] = ()
    box_memory_bytes: Annotated[int, Meta(ge=1)] | None = None  # of the largest one
    grace_seconds: Seconds = 60.0  # for requests that run, once it is drained


class Secrets(Document, frozen=True, omit_defaults=True):
    """What only this manager may know. `api_key`: what brains show it."""

    join_token: str = ""
    api_key: str = ""
    weights: dict[str, str] = field(default_factory=dict)  # credentials of the bucket


_DECODER: Final = msgspec.json.Decoder(InstanceSpec)
_SECRETS: Final = msgspec.json.Decoder(Secrets)


def parse(raw: bytes) -> InstanceSpec:
    """The document, checked as a whole. Raises Invalid with all that is wrong."""
    return checked(decode(raw, _DECODER))


def checked(spec: InstanceSpec) -> InstanceSpec:
    """Raises Invalid with all that is wrong."""
    if problems := engine_problems(spec.engine, has_weights=spec.weights is not None):
        raise Invalid(" ".join(problems))
    return spec


def read_secrets(folder: pathlib.Path) -> Secrets:
    """Of an instance or a job; none where there is no file. Raises OSError and Invalid."""
    try:
        return decode((folder / "secrets.json").read_bytes(), _SECRETS)
    except FileNotFoundError:
        return Secrets()


def engine_problems(engine: EngineSpec, *, has_weights: bool) -> list[str]:
    """Sentences about what can't be started."""
    found: list[str] = []
    if engine.kind == "command" and not engine.command:
        found.append("An engine of kind “command” needs a command.")
    if engine.kind != "command" and engine.command:
        found.append(f"An engine of kind “{engine.kind}” has a command of its own; give it arguments.")
    if engine.kind != "emulator" and engine.emulator:
        found.append(
            "Only the emulator has settings of an emulator: leave `emulator` out, or set it to null."
        )
    if engine.kind in ("vllm", "sglang") and not has_weights:
        found.append(f"{engine.kind} needs weights.")
    return found


def encode(document: Any) -> bytes:
    """Of a spec, in one order of fields: so that equal specs are equal bytes."""
    return msgspec.json.encode(document, order="deterministic")
