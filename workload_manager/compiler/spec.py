"""What a compile job is told."""

from __future__ import annotations

from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from kvss_agent.desired import Document
from kvss_agent.documents import decode
from swdriver_shim.layout import SHARDS_MAX
from workload_manager.compiler.errors import misconfigured
from workload_manager.spec import (
    PROMPT_TOKENS_MAX,
    EngineSpec,
    Text,
    WeightsSpec,
    engine_problems,
)


class CompileSpec(Document, frozen=True, omit_defaults=True):
    """A model, an engine with its arguments, and the boxes of one replica. `box_memory_bytes`: of each
    box, for weights and KV; None: not checked. `has_cache`: it gets a driver."""

    model: Annotated[str, Meta(min_length=1, max_length=500)]
    engine: EngineSpec
    tokens_max: Annotated[int, Meta(ge=2, le=PROMPT_TOKENS_MAX)]
    boxes: Annotated[int, Meta(ge=1, le=SHARDS_MAX)] = 1
    revision: Text = ""  # of the model
    weights: WeightsSpec | None = None
    box_memory_bytes: Annotated[int, Meta(ge=1)] | None = None
    has_cache: bool = True

    def inputs(self, found: dict[str, Any]) -> dict[str, Any]:
        """All that the artifact depends on. `found`: of the model's files.

        Without the engine's environment: it may be secret, and an address that follows from it tells
        whoever guesses it whether they are right."""
        return {"spec": msgspec.to_builtins(self.bare), "files": found}

    @property
    def bare(self) -> CompileSpec:
        """This spec without the engine's environment."""
        engine = msgspec.structs.replace(self.engine, environment={})
        return msgspec.structs.replace(self, engine=engine)


_DECODER: Final = msgspec.json.Decoder(CompileSpec)


def parse(raw: bytes) -> CompileSpec:
    """Raises Invalid, and Refused for what can't be started."""
    spec = decode(raw, _DECODER)
    problems = list(engine_problems(spec.engine, has_weights=spec.weights is not None))
    if problems:
        raise misconfigured("engine", " ".join(problems))
    return spec
