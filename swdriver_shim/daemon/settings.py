"""The settings of a driver's daemon: flags, or environment variables with the same names."""

from __future__ import annotations

import argparse
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from kvss_agent.process.membership import Console
from kvss_agent.process.options import Options, file, name, path, place, redis_url, web_url
from kvss_agent.settings import (
    LOG_FORMATS,
    OTLP_HELP,
    REDIS_URL,
    WEB_URL,
    YES_OR_NO,
    add_console,
    add_plain_control,
    plain_control_problems,
    take_console,
    take_otlp,
)
from swdriver_shim.daemon.shim import TRANSFER_BYTES
from swdriver_shim.desired import ModelSpec
from telemetry.decoder import decode
from telemetry.script import program
from telemetry.units import parse_size

PREFIX: Final = "SWDRIVER_"
TRANSFER_BYTES_MIN: Final = 16 << 20


@dataclass(frozen=True, slots=True)
class Settings:
    name: str
    state_dir: Path
    control: tuple[str, int]
    token: str = field(repr=False)
    plain_control: bool = False
    is_new: bool = False  # the token was just generated
    log_format: str = "text"
    lmcache: tuple[
        tuple[str, tuple[str, int]], ...
    ] = ()  # orgs, and the listeners for their LMCache engines
    telemetry: str | None = field(default=None, repr=False)  # may contain a password
    otlp: str | None = None
    console: Console | None = None
    control_url: str | None = None
    model: ModelSpec | None = None
    engine: str = ""  # the engine that this process is, such as "vllm 0.32.0"; empty for a daemon
    transfer_memory: int = TRANSFER_BYTES

    @property
    def serves_tls(self) -> bool:
        """Whether the API is TLS: certificates come from a console."""
        return self.console is not None and not self.plain_control


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog=f"{program('swdriver_shim')} serve",
        description="Run a driver for the model, agents and orgs that a desired document names. "
        "Runs as any user.",
        epilog=f"Every option may be set in the environment instead: {PREFIX}STATE_DIR for "
        "--state-dir. A flag wins over the environment.",
    )
    add = made.add_argument
    add("--name", help="the name of this driver (default: the host name)")
    add("--state-dir", help="directory of the token and the document (default: .swdriver)")
    add("--control", help="HOST:PORT of the API (default: 127.0.0.1:8420)")
    add_plain_control(made)
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
        "--token-file",
        help="file with the controller's token (default: generated in the state directory)",
    )
    add(
        "--telemetry",
        help="URL of the Redis that receives telemetry, such as rediss://own@… (default: none)",
    )
    add("--otlp", help=OTLP_HELP)
    add("--log-format", help="text or json (default: text)")
    add_console(made)
    add(
        "--model",
        help="file with the `model` of a desired document, reported to the console (default: none)",
    )
    return made


def parse(arguments: Sequence[str], environment: Mapping[str, str]) -> Settings:
    """Flags and environment. Raises WrongSettings with all that is wrong at once."""
    given = Options(parser(), PREFIX, arguments, environment)
    settings = Settings(
        name=given.take("name", socket.gethostname(), name, "1 to 200 letters, digits and . _ -"),
        state_dir=given.take("state_dir", Path(".swdriver"), path, "a path").absolute(),
        control=given.take("control", ("127.0.0.1", 8420), place, "HOST:PORT"),
        token="",
        plain_control=given.take("plain_control", False, YES_OR_NO.__getitem__, "yes or no"),
        log_format=given.take("log_format", "text", LOG_FORMATS.__getitem__, "text or json"),
        lmcache=given.take("lmcache", (), _orgs_at, "ORG=HOST:PORT, or several with commas"),
        telemetry=given.take("telemetry", None, redis_url, REDIS_URL, secret=True),
        otlp=take_otlp(given),
        console=take_console(given),
        control_url=given.take("control_url", None, web_url, WEB_URL),
        transfer_memory=given.take(
            "transfer_memory", TRANSFER_BYTES, _transfer_memory, "a size of 16MiB or more, such as 2GiB"
        ),
        model=given.take("model", None, _model, "a file with a model as docs/driver.md has it"),
    )
    token_file = given.take("token_file", None, file, "a file")
    given.problems += plain_control_problems(
        settings.control, settings.console, plain=settings.plain_control
    )
    given.check()
    token = given.token(token_file, settings.state_dir)
    given.check()
    return replace(settings, token=token, is_new=given.has_made_token)


def _transfer_memory(text: str) -> int:
    return parse_size(text, low=TRANSFER_BYTES_MIN)


def _model(text: str) -> ModelSpec:
    raw = file(text).read_bytes()
    return decode(raw, ModelSpec)  # Malformed is a ValueError


def _orgs_at(text: str) -> tuple[tuple[str, tuple[str, int]], ...]:
    pairs = [one.strip().partition("=") for one in text.split(",")]
    return tuple((name(org), place(where)) for org, _, where in pairs)
