"""The driver of a tiny engine: most of them have none, and start without what it imports."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec

from swdriver_shim.adapters.join_config import JoinConfig
from swdriver_shim.adapters.joining import JoinedDriver
from tests.swdriver_shim.holder import MODEL, load, store


class TinyDriver:
    """It joins as the file says."""

    def __init__(self, file: Path) -> None:
        config = msgspec.json.decode(file.read_bytes(), type=JoinConfig)
        self._joined = JoinedDriver(config, MODEL, "tiny")

    def ask(self, asked: dict[str, Any]) -> Any:
        if "tell" in asked:
            return self._joined.shim.set_desired(json.dumps(asked["tell"]).encode()).generation
        if "store" in asked:
            return store(self._joined, asked["store"])
        return load(self._joined, asked["load"])

    def close(self) -> None:
        self._joined.close()
