"""The arguments of vLLM and SGLang that decide what is in an artifact, and those that a manager sets."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from workload_manager.compiler.errors import misconfigured

FIELD: Final = "engine.arguments"
_SHORT: Final[Mapping[str, str]] = {
    "-tp": "tensor-parallel-size",
    "-pp": "pipeline-parallel-size",
    "-dp": "data-parallel-size",
    "-dcp": "decode-context-parallel-size",
    "-pcp": "prefill-context-parallel-size",
    "-q": "quantization",
    "-sc": "speculative-config",
}
_SAME: Final[Mapping[str, str]] = {  # other names of SGLang's
    "tp-size": "tensor-parallel-size",
    "tp": "tensor-parallel-size",
    "pp-size": "pipeline-parallel-size",
    "dp-size": "data-parallel-size",
    "context-length": "max-model-len",
    "page-size": "block-size",
    "model-path": "model",
    "tokenizer-path": "tokenizer",
}
# The manager says these itself.
MANAGED: Final = frozenset(
    {
        *("model", "tokenizer", "served-model-name", "host", "port", "uds", "api-key"),
        *("kv-transfer-config", "api-server-count", "ssl-keyfile", "ssl-certfile"),
    }
)


class Options:
    """Arguments by name. `flags` and names without a value have an empty one."""

    def __init__(self, arguments: Sequence[str]) -> None:
        """Raises Refused for what only the manager says."""
        self._given = dict(_pairs(arguments))
        for name in self._given:
            if name in MANAGED:
                raise misconfigured(FIELD, f"--{name} is set by the manager; leave it out.")

    @property
    def names(self) -> Sequence[str]:
        return list(self._given)

    def __contains__(self, name: str) -> bool:
        return name in self._given

    def text(self, name: str, otherwise: str = "") -> str:
        return self._given.get(name, otherwise)

    def number(self, name: str, otherwise: int | None = None) -> int | None:
        """A positive one. Raises Refused."""
        given = self._given.get(name)
        if given is None:
            return otherwise
        try:
            value = _amount(given)
        except ValueError:
            value = 0
        if value < 1:
            raise misconfigured(FIELD, f"--{name} is a number from 1 on, not “{given[:40]}”.")
        return value

    def count(self, name: str) -> int:
        """A positive number, by default 1. Raises Refused."""
        return self.number(name, 1) or 1


def _pairs(arguments: Sequence[str]) -> Iterator[tuple[str, str]]:
    name = ""
    for argument in arguments:
        if argument.startswith("-") and not _is_number(argument):
            if name:
                yield name, ""
            name, has_value, value = argument.partition("=")
            name = _SHORT.get(name) or name.removeprefix("--").replace("_", "-")
            name = _SAME.get(name, name)
            if has_value:
                yield name, value
                name = ""
        elif name:
            yield name, argument
            name = ""
        else:
            raise misconfigured(FIELD, f"“{argument[:100]}” follows no option.")
    if name:
        yield name, ""


def _is_number(text: str) -> bool:
    return text.lstrip("-").replace(".", "", 1).isdigit()


def _amount(text: str) -> int:
    """As vLLM reads numbers of tokens: 16k is 16000, and 16K is 16384."""
    scales = {"k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}
    scale = scales.get(text[-1:], 1)
    return int(float(text[:-1]) * scale) if scale > 1 else int(text)
