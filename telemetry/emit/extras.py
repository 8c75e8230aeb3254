"""What is installed only where it is asked for. No Django, and nothing else either."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Final

NO_OTLP: Final = "needs the extra `otlp`, which is not installed here: pip install 'tidegate[otlp]'"


def has_otlp() -> bool:
    try:
        return find_spec("opentelemetry.exporter.otlp.proto.http") is not None
    except ModuleNotFoundError:  # a part of the path is not there
        return False
