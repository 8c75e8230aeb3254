"""What an emulator is told: one document, in a file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from kvss_agent.desired import Document
from kvss_agent.documents import Invalid, decode
from swdriver_shim.adapters.join_config import JoinConfig
from swdriver_shim.layout import SHARDS_MAX
from workload_manager.spec import PRINTED, PROMPT_TOKENS_MAX, EmulatorSpec, Text


class EngineDocument(Document, frozen=True, omit_defaults=True):
    """`model`: as requests name it. `tokenizer`: a folder; empty: each byte of a text is a token.
    `driver`: the console that its driver joins; without one nothing is cached."""

    model: Annotated[str, Meta(min_length=1, max_length=500, pattern=PRINTED)]
    tokens_max: Annotated[int, Meta(ge=2, le=PROMPT_TOKENS_MAX)]
    revision: Text = ""
    boxes: Annotated[int, Meta(ge=1, le=SHARDS_MAX)] = 1
    tokenizer: Annotated[str, Meta(max_length=4096, pattern=PRINTED)] = ""
    emulator: EmulatorSpec = EmulatorSpec()
    driver: JoinConfig | None = None


_DECODER: Final = msgspec.json.Decoder(EngineDocument)


def read(path: Path) -> EngineDocument:
    """Raises Invalid and OSError, each with a sentence."""
    try:
        return decode(path.read_bytes(), _DECODER)
    except Invalid as error:
        raise Invalid(f"{path}: {error}") from error
