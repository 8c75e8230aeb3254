"""The compilation itself: pure. From a spec and the model's files to an artifact, or to a refusal.

What is checked: the engine's arguments against each other and against the model, the length of prompts,
the layout of KV, memory. What is not known without the engine is said in the artifact.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from swdriver_shim.adapters.model_config import depend_on_length
from swdriver_shim.adapters.vllm.blocks import Unsupported, unit_tokens
from swdriver_shim.desired import TOKEN_BYTES_MAX, GroupSpec
from telemetry.units import counted
from telemetry.units import size as shown_size
from workload_manager import kv_layout
from workload_manager.artifact import Artifact, LayoutFacts, MemoryFacts
from workload_manager.compiler.errors import Refused, misconfigured
from workload_manager.compiler.model_files import ModelFiles, is_mounted
from workload_manager.compiler.options import FIELD, Options
from workload_manager.compiler.shapes import CONFIG, Shape, bytes_of, check_nothing_elsewhere, shape_of
from workload_manager.compiler.spec import CompileSpec
from workload_manager.spec import EmulatorSpec

AUTO: Final = ("", "auto")
VLLM_BLOCK_TOKENS: Final = 16  # by default, where nothing of its platform wants another number
SHOWN_MAX: Final = 200  # characters of an argument; of a longer one a hash
_COMPUTED_WITH: Final = frozenset({"dtype", "quantization", "hf-overrides"})
_EMULATED: Final = "the emulator has no arguments but those of staged faults"
_FAULTS: Final = frozenset({"start-seconds", "fail-start", "fail-requests"})
_BYTES_PER_PARAMETER: Final = 2  # of the weights that the emulator does not load


@dataclass(frozen=True, slots=True)
class _Parallel:
    tensor: int
    pipeline: int

    @property
    def workers(self) -> int:
        return self.tensor * self.pipeline


def compile_engine(spec: CompileSpec, files: ModelFiles | None, sha256: str) -> Artifact:
    """`sha256`: the artifact's address. Raises Refused."""
    engine, inputs = spec.engine, spec.inputs(dict(files.identity) if files else {})
    if engine.kind == "emulator":
        made = _emulated(spec, engine.emulator or EmulatorSpec())
    elif engine.kind == "command" or files is None:
        note = "The engine is a command: its driver's report decides about layout and memory."
        memory = MemoryFacts(weights_bytes=files.weights_bytes if files else None, prompt_bytes=None)
        made = _Made({}, memory, None, (note,))
    else:
        made = _of_model(spec, files)
    _check_memory(spec, made.memory)
    return Artifact(
        sha256=sha256,
        inputs=inputs,
        configuration={"engine": engine.kind, "tokens_max": spec.tokens_max, **made.configuration},
        memory=made.memory,
        layout=made.layout if spec.has_cache else None,
        notes=made.notes,
    )


@dataclass(frozen=True, slots=True)
class _Made:
    configuration: Mapping[str, Any]
    memory: MemoryFacts
    layout: LayoutFacts | None
    notes: tuple[str, ...] = ()


def _emulated(spec: CompileSpec, emulator: EmulatorSpec) -> _Made:
    options = Options(spec.engine.arguments)
    if unknown := [name for name in options.names if name not in _FAULTS]:
        raise misconfigured(FIELD, f"{_EMULATED}: not --{unknown[0]}.")
    try:
        model = kv_layout.emulated(spec.model, spec.revision, emulator, spec.boxes)
    except ValueError as error:
        raise misconfigured("boxes", f"{error}.") from None
    layout = LayoutFacts(model.groups, True, model.unit_tokens, model.kv_dtype)
    memory = MemoryFacts(
        weights_bytes=round(emulator.parameters * _BYTES_PER_PARAMETER),
        prompt_bytes=_prompt_bytes(layout, spec.tokens_max),
        workers=spec.boxes,
    )
    configuration = {"domains": emulator.domains, "boxes": spec.boxes, "layout": model.layout}
    return _Made(configuration, memory, layout)


def _of_model(spec: CompileSpec, files: ModelFiles) -> _Made:
    if not is_mounted(spec.weights):
        check_nothing_elsewhere(files.config)
    options, shape = Options(spec.engine.arguments), shape_of(files.config)
    parallel = _parallel(options, shape)
    _check_length(spec, options, shape)
    if spec.has_cache:
        _check_cache(spec, options, shape)
    dtype = options.text("dtype")
    dtype = shape.dtype if dtype in AUTO else dtype
    kv_dtype = options.text("kv-cache-dtype")
    kv_dtype = dtype if kv_dtype in AUTO else kv_dtype
    bytes_of(kv_dtype, "weights.source" if kv_dtype == shape.dtype else FIELD)
    computed_with = _computed_with(spec, options, files.config)
    layout = _layout(spec, options, shape, kv_dtype, parallel, computed_with)
    memory = MemoryFacts(
        weights_bytes=files.weights_bytes,
        prompt_bytes=_prompt_bytes(layout, spec.tokens_max),
        workers=parallel.workers,
    )
    configuration = {
        "architecture": shape.architecture,
        "layers": shape.layers + (shape.state_layers or 0),
        "kv_heads": shape.heads,
        "dtype": dtype,
        "kv_dtype": kv_dtype,
        "tensor_parallel": parallel.tensor,
        "pipeline_parallel": parallel.pipeline,
        "block_tokens": options.number("block-size"),
        "model_tokens_max": shape.tokens_max,
    }
    notes = () if layout else ("What the model keeps of a prompt is known to its engine only.",)
    return _Made(configuration, memory, layout, notes)


def _computed_with(spec: CompileSpec, options: Options, config: Mapping[str, Any]) -> tuple[str, ...]:
    """What decides what KV is beside weights and layout, and may change from revision to revision."""
    found = {
        name: options.text(name)
        for name in sorted(options.names)
        if name.partition(".")[0] in _COMPUTED_WITH and options.text(name) not in AUTO
    }
    if depend_on_length(config) or any(name.startswith("hf-overrides") for name in found):
        found["max-model-len"] = str(options.number("max-model-len") or spec.tokens_max)
    return tuple(f"--{name} {_short(value)}" for name, value in found.items())


def _short(value: str) -> str:
    return value if len(value) <= SHOWN_MAX else f"sha256:{hashlib.sha256(value.encode()).hexdigest()}"


def _parallel(options: Options, shape: Shape) -> _Parallel:
    found = _Parallel(options.count("tensor-parallel-size"), options.count("pipeline-parallel-size"))
    if shape.query_heads % found.tensor:
        raise misconfigured(
            FIELD,
            f"--tensor-parallel-size {found.tensor} does not divide the {shape.query_heads} attention "
            "heads of the model.",
        )
    total = shape.layers + (shape.state_layers or 0)
    if total and found.pipeline > total:
        raise misconfigured(
            FIELD, f"--pipeline-parallel-size {found.pipeline} is more than {total} layers."
        )
    if options.count("data-parallel-size") > 1:
        raise misconfigured(
            FIELD, "An instance is one engine: take more replicas in place of --data-parallel-size."
        )
    return found


def _check_length(spec: CompileSpec, options: Options, shape: Shape) -> None:
    told = options.number("max-model-len")
    if told is not None and told < spec.tokens_max:
        raise misconfigured("tokens_max", f"{spec.tokens_max} is more than --max-model-len {told}.")
    if told is None and shape.tokens_max and spec.tokens_max > shape.tokens_max:
        raise misconfigured(
            "tokens_max",
            f"{spec.tokens_max} is more than the {shape.tokens_max} tokens that the model was made for.",
        )


def _check_cache(spec: CompileSpec, options: Options, shape: Shape) -> None:
    """What the driver in the engine wants."""
    for name in ("decode-context-parallel-size", "prefill-context-parallel-size"):
        if options.count(name) > 1:
            raise misconfigured(
                FIELD, f"With --{name} a block's tokens are spread over workers, and can't be cached."
            )
    if (block := options.number("block-size")) is not None:
        try:
            unit_tokens([block])
        except Unsupported as error:
            raise misconfigured(FIELD, str(error)) from None
    if spec.engine.kind != "vllm" or shape.state_layers == 0:
        return
    if options.text("mamba-cache-mode") != "align" or "no-enable-prefix-caching" in options:
        raise misconfigured(
            FIELD,
            "The model has layers that keep a state: they are cached with --mamba-cache-mode align and "
            "--enable-prefix-caching.",
        )
    if "speculative-config" in options:
        raise misconfigured(FIELD, "With layers that keep a state there is no --speculative-config.")


def _layout(
    spec: CompileSpec,
    options: Options,
    shape: Shape,
    kv_dtype: str,
    parallel: _Parallel,
    computed_with: tuple[str, ...],
) -> LayoutFacts | None:
    """One shard for each worker. None where only states are kept, whose size the engine decides."""
    if not shape.layers:
        return None
    asks = ["The engine's version decides how bytes lie in a block."]
    if shape.state_layers != 0:
        asks.append("The size of states is decided by the engine.")
    if parallel.pipeline > 1:
        asks.append("How layers are divided over pipeline stages is decided by the engine.")
    each = shape.layer_bytes(kv_dtype, parallel.tensor)
    by_window: dict[int | None, int] = {None: shape.full_layers}
    by_window |= dict(shape.windows.items())
    if spec.engine.kind == "sglang" or "disable-hybrid-kv-cache-manager" in options:
        by_window = {None: shape.layers}  # all of every layer is kept
    elif len([count for count in by_window.values() if count]) > 1:
        asks.append("The engine may divide layers with a window into several groups.")
    of_worker = {
        window: max(1, layers // parallel.pipeline) * each
        for window, layers in by_window.items()
        if layers
    }
    if (most := max(of_worker.values())) > TOKEN_BYTES_MAX:
        raise Refused(
            "BadModel",
            CONFIG,
            f"By config.json a token's KV has {shown_size(most)} at each worker, and may have "
            f"{shown_size(TOKEN_BYTES_MAX)}.",
        )
    groups = [
        GroupSpec(
            name="full" if window is None else f"window{window}",
            bytes_per_token=(size,) * parallel.workers,
            window=window,
        )
        for window, size in of_worker.items()
    ]
    block = options.number("block-size")
    if block is None:
        asks.append(f"The size of a block is the engine's, usually {VLLM_BLOCK_TOKENS} tokens.")
    return LayoutFacts(
        tuple(groups),
        is_final=False,
        unit_tokens=None if block is None else unit_tokens([block]),
        kv_dtype=kv_dtype,
        open_questions=tuple(asks),
        computed_with=computed_with,
    )


def _prompt_bytes(layout: LayoutFacts | None, tokens: int) -> int | None:
    if layout is None:
        return None
    return sum(sum(one.bytes_per_token) * min(tokens, one.window or tokens) for one in layout.groups)


def _check_memory(spec: CompileSpec, memory: MemoryFacts) -> None:
    if spec.box_memory_bytes is None or memory.weights_bytes is None:
        return
    there = spec.box_memory_bytes * spec.boxes
    needed = memory.weights_bytes + (memory.prompt_bytes or 0)
    if needed > there:
        raise Refused(
            "ExceedsBoxMemory",
            "boxes",
            f"{counted(spec.boxes, 'box has', 'boxes have')} {shown_size(there)}. The "
            f"weights need {shown_size(memory.weights_bytes)} and the longest prompt "
            f"{shown_size(memory.prompt_bytes or 0)}: {shown_size(needed - there)} more than there "
            "is. Take more boxes, or a smaller `tokens_max`.",
        )
