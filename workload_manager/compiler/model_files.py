"""A model's files, as far as compiling needs them: `config.json`, and names and sizes of the rest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from telemetry.decoder import Limits, Malformed, decode
from workload_manager.compiler.errors import Refused
from workload_manager.compiler.shapes import check_nothing_elsewhere
from workload_manager.spec import WeightsSpec
from workload_manager.weights.errors import WeightsError
from workload_manager.weights.sources import S3, opened

CONFIG: Final = "config.json"
CONFIG_BYTES_MAX: Final = 16 << 20
FIELD: Final = "weights.source"
_CONFIG: Final = Limits(CONFIG_BYTES_MAX, 1 << 20, 64)
_OF_WEIGHTS: Final = (".safetensors", ".bin", ".pt", ".gguf")


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """`identity`: by name, what tells one version of a file from another."""

    config: Mapping[str, Any]
    weights_bytes: int
    identity: Mapping[str, str]


def read(spec: WeightsSpec, credentials: Mapping[str, str]) -> ModelFiles:
    """Raises Refused."""
    try:
        source = opened(spec, credentials)
        found = {one.name: one for one in source.files()}
        if CONFIG not in found:
            raise Refused("BadModel", FIELD, f"There is no {CONFIG} in {spec.source}.")
        if found[CONFIG].size > CONFIG_BYTES_MAX:
            raise Refused("BadModel", FIELD, f"{CONFIG} has more than {CONFIG_BYTES_MAX} bytes.")
        raw = source.small(CONFIG)
    except WeightsError as error:
        raise Refused(error.reason, FIELD, error.sentence) from error
    missing = sorted(spec.files.keys() - found.keys())
    if missing:
        raise Refused("BadModel", "weights.files", f"{spec.source} has no {', '.join(missing[:5])}.")
    config = _decoded(raw)
    weights = [one for one in found.values() if Path(one.name).suffix in _OF_WEIGHTS]
    if not weights:
        raise Refused("BadModel", FIELD, f"{spec.source} has no weights ({', '.join(_OF_WEIGHTS)}).")
    return ModelFiles(
        config,
        _bytes_of_one_kind({one.name: one.size for one in weights}),
        {one.name: f"{one.size} {one.version}" for one in found.values()},
    )


def is_mounted(spec: WeightsSpec | None) -> bool:
    """Whether they are a folder on a mount, which only people of the platform name."""
    return spec is None or not spec.source.startswith(S3)


def check_brought(folder: Path) -> None:
    """What came from a bucket, which may have changed since the compile job. Raises Refused, OSError."""
    file = folder / CONFIG
    if not file.is_file():
        return  # as some engines take it
    if file.stat().st_size > CONFIG_BYTES_MAX:
        raise Refused("BadModel", FIELD, f"{CONFIG} has more than {CONFIG_BYTES_MAX} bytes.")
    check_nothing_elsewhere(_decoded(file.read_bytes()))


def _decoded(raw: bytes) -> dict[str, Any]:
    try:
        return decode(raw, dict[str, Any], _CONFIG)
    except Malformed as error:
        raise Refused("BadModel", FIELD, f"{CONFIG} can't be read: {error}.") from None


def _bytes_of_one_kind(sizes: Mapping[str, int]) -> int:
    """Some models come in several forms; an engine loads the first of these that is there."""
    for kind in _OF_WEIGHTS:
        if found := [size for name, size in sizes.items() if name.endswith(kind)]:
            return sum(found)
    return 0
