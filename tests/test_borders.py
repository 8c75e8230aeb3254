"""What comes from outside is decoded in one place: `telemetry.decoder`, which bounds it.

Plain decoders recurse without an end, take integers of thousands of digits, and raise what nobody
expects (`RecursionError`, `UnicodeDecodeError`). They are allowed where it is written here why they may.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from console.environment import PROJECT

PACKAGES = (
    "cluster_server",
    "console",
    "inference_brain",
    "kvss_agent",
    "swdriver_shim",
    "telemetry",
    "workload_manager",
)
ALLOWED = {
    "console/stack/lock.py": "a file of `make up`, in a directory that is its user's alone",
    "console/stack/supervisor.py": "what a step of `make up` tells, which we have started",
    "console/stack/remembered.py": "a file of `make up`, in a directory that is its user's alone",
    "console/stack/snapshot.py": "a file of `make up`, in a directory that is its user's alone",
    "console/workloads/services.py": "what the database makes of its own rows, a thousand for a list",
    "swdriver_shim/replay/traces.py": "files that somebody replays on a command line, line by line",
    "telemetry/ingest/dead_letters.py": "shows what could not be decoded; its exceptions do not get out",
}
BORDER = "telemetry/decoder.py"
READING = {"loads", "load", "decode"}
PLAIN_MODULES = {"json", "msgspec.json", "msgspec.msgpack"}


def plain_decodings(tree: ast.Module) -> Iterator[ast.expr]:
    """Calls of plain decoders: of modules, of decoders that are kept, and `.json()` of an answer."""
    nodes = list(ast.walk(tree))
    kept = {
        target.id
        for node in nodes
        if isinstance(node, ast.Assign | ast.AnnAssign)
        and isinstance(node.value, ast.Call)
        and ast.unparse(node.value.func).endswith(("json.Decoder", "msgpack.Decoder"))
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if isinstance(target, ast.Name)
    }
    for node in nodes:
        match node:
            case ast.Attribute(attr=name) if name in READING:
                of = ast.unparse(node.value)
                if of in PLAIN_MODULES | kept or ".Decoder(" in of:
                    yield node  # called, or handed on to be called
            case ast.Call(func=ast.Attribute(attr="json"), args=[], keywords=[]):
                yield node


def test_nothing_is_decoded_beside_the_border() -> None:
    found = {
        f"{path.relative_to(PROJECT)}:{call.lineno}: {ast.unparse(call)}"
        for package in PACKAGES
        for path in sorted((PROJECT / package).rglob("*.py"))
        if str(path.relative_to(PROJECT)) not in {*ALLOWED, BORDER}
        for call in plain_decodings(ast.parse(path.read_text()))
    }
    assert not found, "decode it with telemetry.decoder"


@pytest.mark.parametrize("name", ALLOWED)
def test_who_is_allowed_still_needs_it(name: str) -> None:
    assert list(plain_decodings(ast.parse((PROJECT / Path(name)).read_text())))


@pytest.mark.parametrize(
    "code",
    [
        "json.loads(x)",
        "msgspec.json.decode(x, type=int)",
        "answer.json()",
        "D = msgspec.json.Decoder(int)\nD.decode(x)",
        "D: Final = msgspec.msgpack.Decoder(int)\nask(D.decode)",
        "msgspec.json.Decoder(int).decode(x)",
    ],
)
def test_what_is_found(code: str) -> None:
    assert len(list(plain_decodings(ast.parse(code)))) == 1
