"""From a model's `config.json` to the KV of its layers: pure, and nothing of an engine.

What vLLM does with it is vLLM's: here are the sizes that follow from the model alone. Layers that keep a
state (Mamba, linear attention) have sizes that their engine decides.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from workload_manager.compiler.errors import Refused

CONFIG: Final = "weights.source"
LAYERS_MAX: Final = 10_000
NUMBER_MAX: Final = 1 << 30
_BYTES: Final[Mapping[str, int]] = {
    **dict.fromkeys(("float32", "float"), 4),
    **dict.fromkeys(("bfloat16", "float16", "half"), 2),
    **dict.fromkeys(("fp8", "fp8_e4m3", "fp8_e5m2", "fp8_inc", "int8", "float8_e4m3fn"), 1),
}
_FULL: Final = frozenset({"full_attention", "attention", "full"})
_WINDOW: Final = frozenset({"sliding_attention", "sliding_window", "local"})
_HYBRIDS: Final = frozenset(  # that have states, and do not list their layers
    {"mamba", "mamba2", "jamba", "bamba", "falcon_h1", "falcon_mamba", "zamba2", "rwkv", "nemotron_h"}
)
_NAMED: Final = "_name_or_path"  # where it was trained: engines put their own there
_LENGTHENS: Final = frozenset({"yarn", "linear", "dynamic"})  # whose factor lengthens prompts


@dataclass(frozen=True, slots=True)
class Shape:
    """Of a model's KV. `windows`: how many layers have a window of so many tokens. `heads`: of KV; 1
    with a latent (MLA), which is not divided over workers. `numbers`: in a token's KV of one head."""

    architecture: str
    full_layers: int
    windows: Mapping[int, int]
    state_layers: int | None  # None: it has some, nobody says how many
    heads: int
    query_heads: int
    numbers: int
    is_latent: bool
    dtype: str
    tokens_max: int | None

    @property
    def layers(self) -> int:
        return self.full_layers + sum(self.windows.values())

    def layer_bytes(self, dtype: str, workers: int) -> int:
        """Of a token in one layer at one of so many workers. Heads are repeated where there are more
        workers than heads."""
        heads = 1 if self.is_latent else max(1, self.heads // workers)
        return heads * self.numbers * bytes_of(dtype)


def bytes_of(dtype: str, field: str = CONFIG) -> int:
    """Of a number. `field`: of the spec, that says so. Raises Refused."""
    try:
        return _BYTES[dtype]
    except KeyError:
        known = ", ".join(sorted(_BYTES))
        raise Refused(
            "Misconfigured", field, f"The type “{dtype[:50]}” of KV is not known; known are {known}."
        ) from None


def check_nothing_elsewhere(config: Mapping[str, Any]) -> None:
    """Raises Refused for a configuration that has an engine read other models, or files of its machine:
    vLLM loads the verifier of `speculators_config` in place of the model itself. For weights whose owner
    may not read what is mounted."""
    if config.get("speculators_config") is not None:
        raise _refused(
            "config.json has `speculators_config`, by which an engine loads another model than this "
            "one. Only weights on a mount may have it."
        )
    for name, text in _texts(config):
        if name != _NAMED and _leads_out(text):
            raise _refused(
                f"config.json: `{name[:50]}` names “{text[:100]}”, which is outside of the model. Only "
                "weights on a mount may name other files."
            )


def _texts(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """All texts, each with the name of its field. As deep as a document may be."""
    if isinstance(value, str):
        yield name, value
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield from _texts(each, str(key))
    elif isinstance(value, list):
        for each in value:
            yield from _texts(each, name)


def _leads_out(text: str) -> bool:
    return text.startswith(("/", "~", "file:")) or ".." in text.split("/")


def shape_of(config: Mapping[str, Any]) -> Shape:
    """Raises Refused, with what is missing."""
    text = config.get("text_config")
    model: Mapping[str, Any] = {**config, **text} if isinstance(text, Mapping) else config
    architectures = config.get("architectures")
    name = architectures[0] if isinstance(architectures, list) and architectures else ""
    if not isinstance(name, str) or not name:
        raise _refused("config.json names no architecture (`architectures`): no engine could load it.")
    layers = _number(model, ("num_hidden_layers", "n_layer", "n_layers", "num_layers"), LAYERS_MAX)
    query_heads = _number(model, ("num_attention_heads", "n_head", "n_heads"))
    full, windows, states = _kinds(model, layers)
    rank = _optional(model, ("kv_lora_rank",))
    if rank:
        numbers = rank + (_optional(model, ("qk_rope_head_dim",)) or 0)
        heads = 1
    else:
        heads = _optional(model, ("num_key_value_heads", "num_kv_heads", "n_head_kv")) or query_heads
        size = _optional(model, ("head_dim",))
        if not size:
            width = _number(model, ("hidden_size", "n_embd", "d_model"))
            if width % query_heads:
                raise _refused(f"config.json: {query_heads} heads do not divide a width of {width}.")
            size = width // query_heads
        numbers = 2 * size  # a key and a value
    dtype = model.get("dtype") or model.get("torch_dtype") or config.get("torch_dtype") or "bfloat16"
    return Shape(
        name,
        full,
        windows,
        states,
        heads,
        query_heads,
        numbers,
        bool(rank),
        str(dtype).removeprefix("torch."),
        _tokens_max(model),
    )


def _kinds(model: Mapping[str, Any], layers: int) -> tuple[int, dict[int, int], int | None]:
    """How many layers see everything, how many see which window, and how many keep a state."""
    window = _window(model)
    kinds = model.get("layer_types")
    if isinstance(kinds, list):
        return _listed(kinds[:LAYERS_MAX], window)
    if str(model.get("model_type", "")) in _HYBRIDS:
        return 0, {}, None
    pattern = _optional(model, ("sliding_window_pattern", "_sliding_window_pattern"))
    if window and pattern:  # each so-many-th layer sees everything
        full = layers // pattern
        return full, {window: layers - full}, 0
    if window and "max_window_layers" in model:  # those before have none
        full = min(layers, _optional(model, ("max_window_layers",)) or 0)
        return full, {window: layers - full} if layers > full else {}, 0
    return (0, {window: layers}, 0) if window else (layers, {}, 0)


def _listed(kinds: list[Any], window: int | None) -> tuple[int, dict[int, int], int | None]:
    if not all(isinstance(kind, str) for kind in kinds):
        raise _refused("config.json: `layer_types` is a list of names.")
    full = sum(kind in _FULL for kind in kinds)
    seen = sum(kind in _WINDOW for kind in kinds)
    if seen and not window:
        raise _refused("config.json has layers with a window, and no `sliding_window` that says which.")
    return full, {window: seen} if seen and window else {}, len(kinds) - full - seen


def _window(model: Mapping[str, Any]) -> int | None:
    if model.get("use_sliding_window") is False:
        return None
    return _optional(model, ("sliding_window", "sliding_window_size"))


def _tokens_max(model: Mapping[str, Any]) -> int | None:
    """The longest prompt that the model was made for, lengthened as its configuration says."""
    names = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
    found = _optional(model, names)
    scaling = model.get("rope_scaling") or model.get("rope_parameters")
    if not found or not isinstance(scaling, Mapping):
        return found
    kind = scaling.get("rope_type") or scaling.get("type")
    factor = scaling.get("factor")
    if str(kind) not in _LENGTHENS or not isinstance(factor, int | float) or not factor > 1:
        return found
    first = scaling.get("original_max_position_embeddings")
    begin = first if kind == "yarn" and isinstance(first, int) else found
    return max(found, math.floor(min(begin * factor, NUMBER_MAX)))


def _number(model: Mapping[str, Any], names: tuple[str, ...], most: int = NUMBER_MAX) -> int:
    found = _optional(model, names, most)
    if not found:
        raise _refused(f"config.json has no `{names[0]}`.")
    return found


def _optional(model: Mapping[str, Any], names: tuple[str, ...], most: int = NUMBER_MAX) -> int | None:
    """The first that is there; None if none is, or if it is null or 0."""
    for name in names:
        value = model.get(name)
        if value is None or value is False:
            continue
        if type(value) is not int or not 0 <= value <= most:
            raise _refused(f"config.json: `{name}` is a number from 0 to {most}.")
        return value or None
    return None


def _refused(sentence: str) -> Refused:
    return Refused("BadModel", CONFIG, sentence)
