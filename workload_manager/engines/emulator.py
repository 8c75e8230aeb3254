"""The emulator: a process of ours that takes the time that a model would take."""

from __future__ import annotations

from typing import Final

import msgspec

from kvss_agent.process.durable_file import write_durably
from workload_manager.emulator.document import EngineDocument
from workload_manager.engines.base import SOCKET, Given, Launch
from workload_manager.spec import EmulatorSpec

DOCUMENT_FILE: Final = "emulator.json"


def launch(given: Given) -> Launch:
    spec = given.spec
    document = EngineDocument(
        model=spec.model,
        tokens_max=spec.tokens_max,
        revision=spec.weights.revision if spec.weights else "",
        boxes=max(1, len(spec.boxes)),
        tokenizer=str(given.tokenizer or ""),
        emulator=spec.engine.emulator or EmulatorSpec(),
        driver=given.join,
    )
    write_durably(given.folder / DOCUMENT_FILE, msgspec.json.encode(document))
    command = (
        *(given.programs.python, "-m", "workload_manager.emulator"),
        *("--spec", DOCUMENT_FILE, "--listen", f"unix:{SOCKET}"),
        *("--grace-seconds", f"{spec.grace_seconds:g}"),
        *spec.engine.arguments,
    )
    return Launch(command, given.origin, SOCKET, environment=spec.engine.environment)
