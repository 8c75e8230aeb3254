"""Names and files of the demo's processes, below the state directory of the stack.

Imports nothing of Django, for processes that only start others."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

NODES: Final = ("ax-1", "ax-2", "ax-3", "ax-4")
BRAIN: Final = "brain"
MEMORY: Final = "34M"  # of each node
BOX_MEMORY: Final = "256GiB"  # of each box, which is emulated: the demo's models have 130 GiB
VLLM_MODEL: Final = "demo-vllm"  # see `real`
SOCKET_PATH_BYTES_MAX: Final = 107  # as the kernel has it


def folder(state: Path) -> Path:
    return state / "demo"


def directory_of(state: Path, name: str) -> Path:
    """The directory of an agent or the brain."""
    return folder(state) / name


def data_socket(state: Path, node: str) -> Path:
    return directory_of(state, node) / "data.sock"


def over_spine(state: Path, node: str) -> Path:
    """The file with the address of a node's relay: see `spine`."""
    return folder(state) / f"{node}.over-spine"


def tier2(state: Path) -> Path:
    return folder(state) / "tier2"


def tokenizer(state: Path) -> Path:
    """The folder with the tokenizer of the demo's models."""
    return folder(state) / "tokenizer"


def tiny_llama(state: Path) -> Path:
    """The folder with the model of `make up ENGINE=vllm`."""
    return folder(state) / "tiny-llama"


def join_token(state: Path, kind: str) -> Path:
    return folder(state) / f"{kind}.join-token"


def caller_token(state: Path, org: str) -> Path:
    return folder(state) / f"{org}.caller-token"


def fits(state: Path) -> bool:
    """Whether the paths of the agents' sockets are short enough."""
    paths = (data_socket(state, name) for name in NODES)
    return max(len(os.fsencode(path)) for path in paths) <= SOCKET_PATH_BYTES_MAX
