"""The settings of a driver's daemon: flags, or environment variables with the same names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from kvss_agent.process.options import Options, file, name, place
from kvss_agent.process.settings import ProcessKind, ProcessSettings, with_token
from swdriver_shim.daemon.shim import TRANSFER_BYTES
from swdriver_shim.desired import ModelSpec
from telemetry.decoder import decode
from telemetry.script import program
from telemetry.units import parse_size

TRANSFER_BYTES_MIN: Final = 16 << 20
KIND: Final = ProcessKind(
    program=f"{program('swdriver_shim')} serve",
    description="Run a driver for the model, agents and orgs that a desired document names.",
    prefix="SWDRIVER_",
    state_dir=".swdriver",
    port=8420,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings(ProcessSettings):
    # Orgs, and the listeners for their LMCache engines
    lmcache: tuple[tuple[str, tuple[str, int]], ...] = ()
    model: ModelSpec | None = None
    engine: str = ""  # the engine that this process is, such as "vllm 0.32.0"; empty for a daemon
    transfer_memory: int = TRANSFER_BYTES
    promotion: int = 0  # bytes per second; 0 for off


def parse(arguments: Sequence[str], environment: Mapping[str, str]) -> Settings:
    """Flags and environment. Raises WrongSettings with all that is wrong at once."""
    parser = KIND.parser()
    add = parser.add_argument
    add(
        "--lmcache",
        metavar="ORG=HOST:PORT,…",
        help="listen for LMCache engines; every connection is served as this org (default: none)",
    )
    add(
        "--transfer-memory",
        metavar="SIZE",
        help="memory for requests and answers in progress, of which one org gets half at most "
        "(default: 2GiB)",
    )
    add(
        "--promotion",
        metavar="SIZE",
        help="recall prompts that are expected soon from tier 2, at most so much per second, such as "
        "500MiB; 0 for never (default: 0)",
    )
    add(
        "--model",
        help="file with the `model` of a desired document, reported to the console (default: none)",
    )
    given = Options(parser, KIND.prefix, arguments, environment)
    take = given.take
    settings = Settings(
        **KIND.common(given),
        lmcache=take("lmcache", (), _orgs_at, "ORG=HOST:PORT, or several with commas"),
        transfer_memory=take(
            "transfer_memory", TRANSFER_BYTES, _transfer_memory, "a size of 16MiB or more, such as 2GiB"
        ),
        promotion=take(
            "promotion", 0, parse_size, "a size that may be moved per second, such as 500MiB"
        ),
        model=take("model", None, _model, "a file with a model as docs/driver.md has it"),
    )
    return with_token(given, settings)


def _transfer_memory(text: str) -> int:
    return parse_size(text, low=TRANSFER_BYTES_MIN)


def _model(text: str) -> ModelSpec:
    raw = file(text).read_bytes()
    return decode(raw, ModelSpec)  # Malformed is a ValueError


def _orgs_at(text: str) -> tuple[tuple[str, tuple[str, int]], ...]:
    pairs = [one.strip().partition("=") for one in text.split(",")]
    return tuple((name(org), place(where)) for org, _, where in pairs)
