"""The settings of a manager: flags, or environment variables with the same names."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvss_agent.process.options import Options, path, place
from swdriver_shim.adapters.join_config import default_state_dir
from telemetry.script import program
from workload_manager.compiler.command import STORE
from workload_manager.engines.base import Programs
from workload_manager.preparation import Stores

PREFIX: Final = "MANAGER_"
LOCAL: Final = ("127.0.0.1", 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """`state_dir`: what instances of this machine share, in folders by kind."""

    folder: Path
    state_dir: Path
    artifacts: Path
    listen: tuple[str, int]
    programs: Programs
    log_format: str = "text"

    @property
    def stores(self) -> Stores:
        return Stores(self.artifacts, self.state_dir / "weights", self.state_dir / "tokenizers")

    @property
    def name(self) -> str:
        return self.folder.name


WHAT: Final = {
    "run": "Run the engine of one instance: prepare it, start it, keep it running.",
    "execute": "Ask an engine what a job lists, and end it.",
}


def parser(verb: str) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog=f"{program('workload_manager')} {verb}",
        description=WHAT[verb],
        epilog="Every option may be set in the environment instead: MANAGER_STATE_DIR for --state-dir. "
        "A flag wins over the environment.",
    )
    add = made.add_argument
    add("--folder", help="folder of the instance or job, with spec.json and secrets.json (required)")
    add("--state-dir", help="what instances share: drivers, weights (default: ~/.local/state/tidegate)")
    add("--listen", metavar="HOST:PORT", help="where requests come (default: 127.0.0.1:0, any port)")
    add("--vllm-python", metavar="PROGRAM", help="the Python that has vLLM (default: this one)")
    add("--sglang-python", metavar="PROGRAM", help="the Python that has SGLang (default: this one)")
    add("--log-format", help="text or json (default: text)")
    return made


def parse(arguments: Sequence[str], environment: Mapping[str, str], verb: str) -> Settings:
    """Flags and environment. Raises WrongSettings with all that is wrong at once."""
    given = Options(parser(verb), PREFIX, arguments, environment)
    take = given.take
    folder = take("folder", None, path, "a folder")
    if folder is None:
        given.problems.append("--folder is missing: the folder of the instance.")
    elif not folder.is_dir():
        given.problems.append(f"--folder is {str(folder)!r}: there is no such folder.")
    state_dir = take("state_dir", default_state_dir(), path, "a path").absolute()
    artifacts = environment.get(STORE)
    settings = Settings(
        folder=(folder or Path()).absolute(),
        state_dir=state_dir,
        artifacts=Path(artifacts).absolute() if artifacts else state_dir / "artifacts",
        listen=take("listen", LOCAL, place, "HOST:PORT"),
        programs=Programs(
            sys.executable,
            take("vllm_python", sys.executable, _program, "a program"),
            take("sglang_python", sys.executable, _program, "a program"),
        ),
        log_format=given.log_format(),
    )
    given.check()
    return settings


def _program(text: str) -> str:
    if not text.strip():
        raise ValueError(text)
    return text
