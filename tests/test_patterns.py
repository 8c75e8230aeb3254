"""Texts of documents by their patterns: none takes a newline at the end, as `$` alone would."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from msgspec import inspect

from console.workloads.spec import Settings, Template, WorkloadSpec
from inference_brain.desired import Desired as OfBrain
from inference_brain.endpoints import Endpoint
from kvss_agent.desired import Desired as OfAgent
from workload_manager.artifact import Artifact
from workload_manager.compiler import CompileSpec
from workload_manager.emulator.document import EngineDocument
from workload_manager.execution import ExecuteSpec
from workload_manager.spec import InstanceSpec, Secrets, WeightsSpec

KINDS = (
    *(Artifact, CompileSpec, EngineDocument, Endpoint, ExecuteSpec, InstanceSpec, Secrets),
    *(OfAgent, OfBrain, Settings, Template, WorkloadSpec),
)
TEXTS = ("a", "A", "0" * 32, "0" * 64, "https://x", "/tokenize")


def patterns(value: Any, seen: set[type]) -> Iterator[str]:
    """Of a type, and of all that are in it."""
    if isinstance(value, inspect.StructType):
        if value.cls in seen:
            return
        seen.add(value.cls)
    if isinstance(value, inspect.StrType) and value.pattern is not None:
        yield value.pattern
    if isinstance(value, msgspec.Struct):
        for name in value.__struct_fields__:
            yield from patterns(getattr(value, name), seen)
    elif isinstance(value, tuple):
        for one in value:
            yield from patterns(one, seen)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: f"{kind.__module__}.{kind.__name__}")
def test_no_pattern_takes_a_newline_at_the_end(kind: type[msgspec.Struct]) -> None:
    found = {one for one in patterns(inspect.type_info(kind), set()) if "$" in one}
    for pattern in found:
        assert any(re.search(pattern, text) for text in TEXTS), f"no text for {pattern}"
        taken = [text for text in TEXTS if re.search(pattern, f"{text}\n")]
        assert not taken, f"{pattern} takes a newline"


def test_the_patterns_are_found() -> None:
    assert len(set(patterns(inspect.type_info(WorkloadSpec), set()))) >= 5


def test_a_source_with_a_newline_is_refused() -> None:
    with pytest.raises(msgspec.ValidationError, match="regex"):
        msgspec.convert({"source": "/weights\n"}, WeightsSpec)
