"""The model of `make up ENGINE=vllm` is one that engines load, and whose KV can be foretold."""

from __future__ import annotations

import json
import math
import struct
from itertools import pairwise
from pathlib import Path

from console.demo import tiny_llama
from workload_manager.compiler import model_files
from workload_manager.compiler.compilation import compile_engine
from workload_manager.compiler.spec import CompileSpec
from workload_manager.spec import EngineSpec, WeightsSpec


def test_its_weights_are_as_the_header_of_the_file_says(tmp_path: Path) -> None:
    tiny_llama.write(tmp_path)
    raw = (tmp_path / "model.safetensors").read_bytes()
    [size] = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + size])
    del header["__metadata__"]
    config = json.loads((tmp_path / "config.json").read_text())
    assert header["model.embed_tokens.weight"]["shape"][0] == config["vocab_size"]
    places = [one["data_offsets"] for one in header.values()]
    assert all(before[1] == after[0] for before, after in pairwise(places))
    assert places[-1][1] == len(raw) - 8 - size
    for one in header.values():
        begin, end = one["data_offsets"]
        assert end - begin == 4 * math.prod(one["shape"])


def test_it_is_compiled_and_left_as_it_is(tmp_path: Path) -> None:
    tiny_llama.write(tmp_path)
    before = {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    tiny_llama.write(tmp_path)
    assert {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == before
    weights = WeightsSpec(source=str(tmp_path))
    spec = CompileSpec(
        model="tiny", engine=EngineSpec(kind="vllm"), tokens_max=2048, boxes=1, weights=weights
    )
    made = compile_engine(spec, model_files.read(weights, {}), "0" * 64)
    assert made.layout
    assert made.memory.weights_bytes == (tmp_path / "model.safetensors").stat().st_size
