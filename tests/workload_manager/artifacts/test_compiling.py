"""Compile jobs: what is found in a model's files, what is refused, and the process that does it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from console.environment import PROJECT
from tests.live import wait_until
from workload_manager import kv_layout
from workload_manager.artifact import Artifact, ArtifactStore
from workload_manager.compiler import CompileSpec, Refused
from workload_manager.compiler.command import main, run
from workload_manager.compiler.compilation import compile_engine
from workload_manager.compiler.model_files import ModelFiles, check_brought
from workload_manager.compiler.shapes import shape_of
from workload_manager.single_flight import alone
from workload_manager.spec import EmulatorSpec, EngineSpec, WeightsSpec

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "torch_dtype": "bfloat16",
    "max_position_embeddings": 8192,
}
GEMMA: dict[str, Any] = {
    **LLAMA,
    "architectures": ["Gemma3ForCausalLM"],
    "head_dim": 256,
    "sliding_window": 1024,
    "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 4,
    "num_hidden_layers": 24,
}
DEEPSEEK: dict[str, Any] = {
    **LLAMA,
    "architectures": ["DeepseekV3ForCausalLM"],
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "num_hidden_layers": 61,
}
QWEN_NEXT: dict[str, Any] = {
    **LLAMA,
    "architectures": ["Qwen3NextForCausalLM"],
    "num_hidden_layers": 8,
    "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 2,
}
WEIGHTS = WeightsSpec(source="/weights")
GIB = 1 << 30


def spec(*arguments: str, kind: str = "vllm", **more: Any) -> CompileSpec:
    engine = EngineSpec(kind=kind, arguments=arguments)  # type: ignore[arg-type]
    return CompileSpec(
        **{"model": "m", "engine": engine, "tokens_max": 8192, "weights": WEIGHTS, **more}
    )


def compiled(config: Mapping[str, Any], *arguments: str, **more: Any) -> Artifact:
    files = ModelFiles(config, 16 * GIB, {"config.json": "1"})
    return compile_engine(spec(*arguments, **more), files, "0" * 64)


def groups(artifact: Artifact) -> dict[str, tuple[tuple[int, ...], int | None]]:
    assert artifact.layout
    return {one.name: (one.bytes_per_token, one.window) for one in artifact.layout.groups}


def test_the_kv_of_a_llama_follows_from_its_configuration() -> None:
    found = compiled(LLAMA, "--block-size", "32")
    # 32 layers, 8 heads, key and value of 128 numbers of 2 bytes
    assert groups(found) == {"full": ((32 * 8 * 2 * 128 * 2,), None)}
    assert found.layout
    assert (found.layout.unit_tokens, found.layout.kv_dtype) == (64, "bfloat16")
    assert not found.layout.is_final
    assert found.memory.prompt_bytes == 8192 * 131_072
    assert found.memory.weights_bytes == 16 * GIB
    assert found.configuration["architecture"] == "LlamaForCausalLM"


@pytest.mark.parametrize(
    ("config", "arguments", "expected"),
    [
        (LLAMA, ("--tensor-parallel-size", "4"), {"full": ((32_768,) * 4, None)}),
        (LLAMA, ("-tp=16",), {"full": ((16_384,) * 16, None)}),  # half of a head each: repeated
        (LLAMA, ("--kv-cache-dtype", "fp8"), {"full": ((65_536,), None)}),
        (LLAMA, ("--dtype=float32",), {"full": ((262_144,), None)}),
        (DEEPSEEK, ("-tp", "8"), {"full": ((61 * 576 * 2,) * 8, None)}),  # a latent is not divided
        (
            GEMMA,
            (),
            {"full": ((4 * 8 * 512 * 2,), None), "window1024": ((20 * 8 * 512 * 2,), 1024)},
        ),
        (GEMMA, ("--disable-hybrid-kv-cache-manager",), {"full": ((24 * 8 * 512 * 2,), None)}),
        ({**LLAMA, "sliding_window": 4096}, (), {"window4096": ((131_072,), 4096)}),
        (
            {**LLAMA, "sliding_window": 4096, "use_sliding_window": False},
            (),
            {"full": ((131_072,), None)},
        ),
        (
            {"text_config": LLAMA, "architectures": ["LlavaForConditionalGeneration"]},
            (),
            {"full": ((131_072,), None)},
        ),
    ],
)
def test_layouts(config: dict[str, Any], arguments: tuple[str, ...], expected: dict[str, Any]) -> None:
    assert groups(compiled(config, *arguments)) == expected


def test_what_a_prompt_is_computed_with_keeps_revisions_apart() -> None:
    """The layout is the same, and the bytes are not."""

    def said(config: Mapping[str, Any], *arguments: str, **more: Any) -> tuple[str, ...]:
        layout = compiled(config, *arguments, **more).layout
        assert layout
        return layout.computed_with

    phi = {**LLAMA, "max_position_embeddings": 131072, "original_max_position_embeddings": 4096}
    assert said(LLAMA) == said(LLAMA, tokens_max=4096) == said(LLAMA, "--dtype", "auto") == ()
    assert said(phi, tokens_max=4096) != said(phi, tokens_max=8192)
    assert said(phi, "--max-model-len", "8192", tokens_max=4096) == said(phi, tokens_max=8192)
    assert said(LLAMA, "-q", "fp8") == ("--quantization fp8",)
    overridden = said(LLAMA, "--hf-overrides", '{"rope_theta": 1e6}')
    assert overridden != said(LLAMA, "--hf-overrides", '{"rope_theta": 5e5}')
    assert len(said(LLAMA, "--hf-overrides", '{"a": "%s"}' % ("b" * 5000))[0]) < 100


def test_a_window_bounds_what_a_prompt_needs() -> None:
    needed = compiled(GEMMA).memory.prompt_bytes
    assert needed == 8192 * 4 * 8 * 512 * 2 + 1024 * 20 * 8 * 512 * 2


def test_what_only_the_engine_knows_is_said() -> None:
    states = ("--mamba-cache-mode", "align", "--enable-prefix-caching")
    found = compiled(QWEN_NEXT, *states)
    assert found.layout
    assert any("states" in one for one in found.layout.open_questions)
    assert groups(found) == {"full": ((2 * 4096,), None)}
    mamba = {**LLAMA, "model_type": "mamba2", "architectures": ["Mamba2ForCausalLM"]}
    only_states = compiled(mamba, *states)
    assert only_states.layout is None
    assert only_states.notes
    command = CompileSpec(
        model="m", engine=EngineSpec(kind="command", command=("serve",)), tokens_max=100
    )
    assert "driver's report decides" in compile_engine(command, None, "0" * 64).notes[0]


@pytest.mark.parametrize(
    ("config", "arguments", "more", "field", "sentence"),
    [
        (LLAMA, ("-tp", "3"), {}, "engine.arguments", "does not divide the 32 attention heads"),
        (LLAMA, ("-tp", "zero"), {}, "engine.arguments", "is a number from 1 on"),
        (LLAMA, ("--port", "80"), {}, "engine.arguments", "--port is set by the manager"),
        (LLAMA, ("--host=0.0.0.0",), {}, "engine.arguments", "--host is set by the manager"),
        (LLAMA, ("serve",), {}, "engine.arguments", "follows no option"),
        (LLAMA, ("-dp", "2"), {}, "engine.arguments", "take more replicas"),
        (LLAMA, ("-pp", "33"), {}, "engine.arguments", "is more than 32 layers"),
        (LLAMA, ("--block-size", "65537"), {}, "engine.arguments", "no common border"),
        (LLAMA, ("-dcp", "2"), {}, "engine.arguments", "can't be cached"),
        (LLAMA, (), {"tokens_max": 10_000}, "tokens_max", "more than the 8192 tokens"),
        (LLAMA, ("--max-model-len", "4k"), {}, "tokens_max", "more than --max-model-len 4000"),
        (LLAMA, ("--kv-cache-dtype", "int2"), {}, "engine.arguments", "“int2” of KV is not known"),
        (LLAMA, (), {"box_memory_bytes": 12 * GIB}, "boxes", "5 GiB more than there is"),
        (QWEN_NEXT, (), {}, "engine.arguments", "--mamba-cache-mode align"),
        ({}, (), {}, "weights.source", "names no architecture"),
        ({"architectures": ["X"]}, (), {}, "weights.source", "no `num_hidden_layers`"),
        ({**LLAMA, "num_hidden_layers": "many"}, (), {}, "weights.source", "is a number from"),
        ({**GEMMA, "sliding_window": None}, (), {}, "weights.source", "no `sliding_window`"),
        ({**LLAMA, "layer_types": [["full_attention"]]}, (), {}, "weights.source", "a list of names"),
        ({**LLAMA, "head_dim": 1 << 30}, (), {}, "weights.source", "at each worker, and may have 1 GiB"),
    ],
)
def test_refusals_name_the_field(
    config: dict[str, Any], arguments: tuple[str, ...], more: dict[str, Any], field: str, sentence: str
) -> None:
    with pytest.raises(Refused) as refusal:
        compiled(config, *arguments, **more)
    assert refusal.value.field == field
    assert sentence in refusal.value.sentence
    assert refusal.value.sentence.startswith(f"`{field}`: ")


VERIFIER = {"verifier": {"name_or_path": "/mnt/models/of-another-org"}}


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        ({"speculators_config": VERIFIER}, "loads another model"),
        ({"speculators_config": {}}, "loads another model"),
        ({"draft": VERIFIER}, "`name_or_path` names “/mnt/models/of-another-org”"),
        ({"text_config": {**LLAMA, "towers": ["a", "../../b"]}}, "`towers` names “../../b”"),
        ({"audio_model_id": "~/b"}, "outside of the model"),
    ],
)
def test_a_model_of_a_bucket_names_nothing_of_the_machine(
    more: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    """Engines would read it: of another org, too. What is mounted is named by people of the platform."""
    config = {**LLAMA, **more}
    with pytest.raises(Refused, match=sentence) as refusal:
        compiled(config, weights=WeightsSpec(source="s3://mine/model"))
    assert refusal.value.field == "weights.source"
    assert compiled(config).layout
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(Refused, match=sentence):  # after it was compiled, and has changed
        check_brought(tmp_path)


def test_where_a_model_was_trained_is_no_path_that_is_read(tmp_path: Path) -> None:
    config = {**LLAMA, "_name_or_path": "/home/a/llama"}
    assert compiled(config, weights=WeightsSpec(source="s3://mine/model")).layout
    check_brought(tmp_path)  # without a config.json, as some engines take it


def test_prompts_may_be_longer_where_the_model_was_lengthened() -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192}
    found = compiled({**LLAMA, "rope_scaling": yarn}, tokens_max=32_768)
    assert found.configuration["model_tokens_max"] == 32_768
    for factor, most in ((1e308, 1 << 30), (2, 1 << 14)):
        linear = {"type": "linear", "factor": factor}
        endless = compiled({**LLAMA, "rope_scaling": linear})
        assert endless.configuration["model_tokens_max"] == most
    assert compiled({**LLAMA, "rope_scaling": {"type": {}, "factor": 2}}).configuration
    llama3 = {"rope_type": "llama3", "factor": 8.0}
    with pytest.raises(Refused):
        compiled({**LLAMA, "rope_scaling": llama3}, tokens_max=32_768)


@given(
    st.dictionaries(
        st.sampled_from(
            [*LLAMA, *GEMMA, *DEEPSEEK, "rope_scaling", "text_config", "use_sliding_window"]
        ),
        st.none()
        | st.booleans()
        | st.integers()
        | st.floats(allow_nan=False)
        | st.text(max_size=5)
        | st.lists(
            st.sampled_from(["full_attention", "sliding_attention", "mamba"]) | st.lists(st.text()),
            max_size=4,
        )
        | st.dictionaries(
            st.sampled_from(["rope_type", "factor", "head_dim"]),
            st.integers() | st.just("linear") | st.floats(allow_nan=False) | st.lists(st.text()),
        ),
    )
)
def test_any_configuration_is_a_shape_or_a_sentence(changes: dict[str, Any]) -> None:
    try:
        shape = shape_of({**LLAMA, **changes})
    except Refused:
        return
    assert shape.layers >= 0
    assert shape.numbers > 0


def test_the_emulators_layout_is_what_its_driver_will_report() -> None:
    emulator = EmulatorSpec(domains=3, bytes_per_token=100, window_tokens=512)
    told = CompileSpec(
        model="m",
        engine=EngineSpec(kind="emulator", emulator=emulator),
        tokens_max=1000,
        boxes=2,
        revision="r1",
    )
    found = compile_engine(told, None, "0" * 64)
    model = kv_layout.emulated("m", "r1", emulator, 2)
    assert found.layout
    assert found.layout.is_final
    assert found.layout.groups == model.groups
    assert [len(one.bytes_per_token) for one in model.groups] == [6, 6]
    assert found.memory.prompt_bytes == 600 * 1000 + 600 * 512
    wrong = msgspec.structs.replace(told.engine, arguments=("--tensor-parallel-size", "2"))
    with pytest.raises(Refused, match="staged faults"):
        compile_engine(msgspec.structs.replace(told, engine=wrong), None, "0" * 64)


# The process


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    folder = tmp_path / "weights"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA))
    (folder / "model.safetensors").write_bytes(bytes(1000))
    return folder


@pytest.fixture
def job(tmp_path: Path) -> Callable[[str, CompileSpec], Path]:
    def made(name: str, told: CompileSpec) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        (folder / "spec.json").write_bytes(msgspec.json.encode(told))
        return folder

    return made


def test_a_job_leaves_its_artifact_and_the_next_finds_it(
    weights: Path, job: Callable[[str, CompileSpec], Path], tmp_path: Path
) -> None:
    told = spec(weights=WeightsSpec(source=str(weights)))
    store = ("--store", str(tmp_path / "store"))
    first, second = job("first", told), job("second", told)
    assert main(["--folder", str(first), *store]) == 0
    assert json.loads((first / "progress.json").read_text())["done"] == 2
    result = json.loads((first / "result.json").read_text())
    assert ArtifactStore(tmp_path / "store").get(result["sha256"])
    [file] = tmp_path.glob("store/sha256/*.json")
    before = file.stat().st_mtime_ns
    assert main(["--folder", str(second), *store]) == 0
    assert (second / "result.json").read_text() == (first / "result.json").read_text()
    assert file.stat().st_mtime_ns == before, "it was not made twice"
    (weights / "model.safetensors").write_bytes(bytes(2000))
    third = job("third", told)
    assert main(["--folder", str(third), *store]) == 0
    assert json.loads((third / "result.json").read_text())["sha256"] != result["sha256"]


@pytest.mark.parametrize(
    ("change", "reason", "sentence"),
    [
        ({"weights": WeightsSpec(source="/no/where")}, "NotFound", "There is no folder /no/where"),
        ({"tokens_max": 9000}, "Misconfigured", "`tokens_max`: 9000 is more than"),
        ({"weights": None}, "Misconfigured", "vllm needs weights"),
    ],
)
def test_a_job_that_is_refused_says_why(
    weights: Path,
    job: Callable[[str, CompileSpec], Path],
    tmp_path: Path,
    change: dict[str, Any],
    reason: str,
    sentence: str,
) -> None:
    told = spec(**{"weights": WeightsSpec(source=str(weights)), **change})
    folder = job("job", told)
    assert main(["--folder", str(folder), "--store", str(tmp_path / "store")]) == 1
    error = json.loads((folder / "error.json").read_text())
    assert error["reason"] == reason
    assert sentence in error["sentence"]
    assert not (folder / "result.json").exists()


@pytest.mark.parametrize(
    ("raw", "sentence"),
    [(b"{}", "missing required field"), (b'{"model": 3}', "$.model"), (b"", "truncated")],
)
def test_a_job_without_a_spec_says_so(tmp_path: Path, raw: bytes, sentence: str) -> None:
    (tmp_path / "spec.json").write_bytes(raw)
    assert main(["--folder", str(tmp_path), "--store", str(tmp_path / "store")]) == 1
    assert sentence in json.loads((tmp_path / "error.json").read_text())["sentence"]
    assert main(["--folder", str(tmp_path / "nowhere"), "--store", str(tmp_path / "store")]) == 1


@pytest.mark.parametrize("kill", [signal.SIGTERM, signal.SIGKILL])
def test_a_job_that_waits_for_another_ends_at_once_and_leaves_nothing(
    weights: Path, job: Callable[[str, CompileSpec], Path], tmp_path: Path, kill: signal.Signals
) -> None:
    told = spec(weights=WeightsSpec(source=str(weights)))
    store, folder = tmp_path / "store", job("job", told)
    artifact = run(job("before", told), ArtifactStore(tmp_path / "other"), threading.Event())
    (store / "sha256").mkdir(parents=True)
    code = "import sys; from workload_manager.compiler.command import main; sys.exit(main(sys.argv[1:]))"
    with alone(store / "sha256" / f".{artifact.sha256}.lock"):
        process = subprocess.Popen(
            [sys.executable, "-c", code, "--folder", str(folder), "--store", str(store)], cwd=PROJECT
        )
        progress = folder / "progress.json"
        wait_until("it waits", lambda: progress.exists() and b'"done":1' in progress.read_bytes())
        process.send_signal(kill)
        assert process.wait(60) == (143 if kill is signal.SIGTERM else -signal.SIGKILL)
    assert not (folder / "result.json").exists()
    assert main(["--folder", str(folder), "--store", str(store)]) == 0
