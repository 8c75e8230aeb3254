"""The code of the interface is what the compiler makes of it."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from console.environment import PROJECT

MADE = ("cluster_pb2.py", "cluster_pb2.pyi")


@pytest.mark.slow
def test_the_generated_code_is_that_of_the_interface(tmp_path: Path) -> None:
    out = [f"--{kind}_out={tmp_path}" for kind in ("python", "pyi")]
    compiler = [sys.executable, "-m", "grpc_tools.protoc", "-I", ".", *out]
    subprocess.run([*compiler, "cluster_server/proto/cluster.proto"], cwd=PROJECT, check=True)
    for name in MADE:
        path = f"cluster_server/proto/{name}"
        assert (tmp_path / path).read_text() == (PROJECT / path).read_text(), f"`make proto` for {name}"


def test_the_extra_asks_for_a_protobuf_that_takes_the_generated_code() -> None:
    text = (PROJECT / "cluster_server/proto/cluster_pb2.py").read_text()
    made = re.findall(r"^# Protobuf Python Version: (\S+)$", text, re.MULTILINE)
    extras = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert [one for one in extras["cluster"] if one.startswith("protobuf")] == [f"protobuf>={made[0]}"]
