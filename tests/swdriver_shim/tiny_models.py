"""Small models with seeded random weights, and what they compute without us. Needs torch.

    python -m tests.swdriver_shim.tiny_models gemma3 URL TOKEN FILE < tokens.json

is an engine in a process of its own: it serves one prompt through a daemon, and writes the logits.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import torch
from transformers import (
    AutoModelForCausalLM,
    BambaConfig,
    DynamicCache,
    FalconH1Config,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GraniteMoeHybridConfig,
    JambaConfig,
    Lfm2Config,
    LlamaConfig,
    LlamaForCausalLM,
    Mamba2Config,
    MambaConfig,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen3NextConfig,
)

from swdriver_shim.adapters.remote import RemotePrefixes
from swdriver_shim.adapters.transformers import PrefixCache, model_spec
from swdriver_shim.adapters.transformers_states import cached
from swdriver_shim.desired import ModelSpec

torch.set_num_threads(1)  # sums are split up by threads, and processes beside each other share cores

VOCABULARY: Final = 211
WINDOW: Final = 100
CHUNK: Final = 128
SHAPE: Final[dict[str, Any]] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "initializer_range": 0.15,  # with the usual 0.02 a small model hardly looks at what came before
    "max_position_embeddings": 4096,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def llama() -> PreTrainedModel:
    """All layers look at everything."""
    return _seeded(LlamaForCausalLM, LlamaConfig(num_hidden_layers=3, **SHAPE))


def mistral(window: int = WINDOW) -> PreTrainedModel:
    """All layers look at a window."""
    config = MistralConfig(num_hidden_layers=3, sliding_window=window, **SHAPE)
    return _seeded(MistralForCausalLM, config)


def gemma3(window: int = WINDOW) -> PreTrainedModel:
    """Some do, some do not."""
    kinds = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
    more = {"sliding_window": window, "layer_types": kinds, "query_pre_attn_scalar": 16}
    return _seeded(Gemma3ForCausalLM, Gemma3TextConfig(num_hidden_layers=4, **SHAPE, **more))


MODELS: Final = {"llama": llama, "mistral": mistral, "gemma3": gemma3}

_WITHOUT_ATTENTION: Final = {
    name: SHAPE[name]
    for name in (
        *("vocab_size", "hidden_size", "initializer_range"),
        *("bos_token_id", "eos_token_id", "pad_token_id"),
    )
}
_HYBRID: Final = {name: size for name, size in SHAPE.items() if name != "head_dim"}
_MAMBA: Final = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
    "mamba_n_groups": 2,
    "mamba_chunk_size": 32,
}


def qwen3_next() -> PreTrainedModel:
    """Three layers of linear attention, and one of attention."""
    heads = {"linear_num_value_heads": 4, "linear_num_key_heads": 2}
    sizes = {"linear_key_head_dim": 16, "linear_value_head_dim": 16}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    shared = {"shared_expert_intermediate_size": 32}
    config = Qwen3NextConfig(num_hidden_layers=4, **SHAPE, **heads, **sizes, **experts, **shared)
    return _seeded(AutoModelForCausalLM.from_config, config)


def falcon_h1() -> PreTrainedModel:
    """All layers have both attention and a state."""
    config = FalconH1Config(num_hidden_layers=2, mamba_d_ssm=128, **_HYBRID, **_MAMBA)
    return _seeded(AutoModelForCausalLM.from_config, config)


def granite() -> PreTrainedModel:
    """Layers of Mamba 2 and of attention take turns."""
    kinds = ["mamba", "attention", "mamba", "attention"]
    more = {"shared_intermediate_size": 64, "num_local_experts": 0, "mamba_expand": 2}
    config = GraniteMoeHybridConfig(num_hidden_layers=4, layer_types=kinds, **_HYBRID, **_MAMBA, **more)
    return _seeded(AutoModelForCausalLM.from_config, config)


def lfm2() -> PreTrainedModel:
    """Short convolutions, whose state is the last tokens' inputs, and attention."""
    kinds = ["conv", "full_attention", "conv", "full_attention"]
    config = Lfm2Config(num_hidden_layers=4, layer_types=kinds, **_HYBRID)
    return _seeded(AutoModelForCausalLM.from_config, config)


def mamba2() -> PreTrainedModel:
    """No attention at all."""
    shape = {"state_size": 8, "num_heads": 8, "head_dim": 16, "n_groups": 2, "chunk_size": 32}
    config = Mamba2Config(num_hidden_layers=3, **shape, **_WITHOUT_ATTENTION)
    return _seeded(AutoModelForCausalLM.from_config, config)


def mamba() -> PreTrainedModel:
    """Several tokens after others are computed as if nothing were before them."""
    config = MambaConfig(num_hidden_layers=3, state_size=8, **_WITHOUT_ATTENTION)
    return _seeded(AutoModelForCausalLM.from_config, config)


def jamba() -> PreTrainedModel:
    """Likewise."""
    periods = {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 8}
    experts = {"num_experts": 2, "num_experts_per_tok": 1}
    config = JambaConfig(num_hidden_layers=4, **_HYBRID, **periods, **experts)
    return _seeded(AutoModelForCausalLM.from_config, config)


def bamba() -> PreTrainedModel:
    """Likewise, and one token as well."""
    config = BambaConfig(num_hidden_layers=4, attn_layer_indices=[1, 3], **_HYBRID, **_MAMBA)
    return _seeded(AutoModelForCausalLM.from_config, config)


STATEFUL: Final = {
    "qwen3_next": qwen3_next,
    "falcon_h1": falcon_h1,
    "granite": granite,
    "lfm2": lfm2,
    "mamba2": mamba2,
}
NOT_CONTINUED: Final = {"mamba": mamba, "jamba": jamba, "bamba": bamba}


def _seeded(kind: Any, config: Any) -> PreTrainedModel:
    torch.manual_seed(7)
    return kind(config).float().eval()


def spec_of(model: PreTrainedModel, revision: str = "r1") -> ModelSpec:
    return model_spec(model.config, model.dtype, "tiny", revision)


def numbers(seed: int, count: int) -> list[int]:
    """Tokens of a prompt."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCABULARY, (count,), generator=generator).tolist()  # type: ignore[no-any-return]


def compute(model: PreTrainedModel, tokens: Sequence[int], ends: Iterable[int] = ()) -> Any:
    """Logits of the last token and the cache, computed in pieces that end at these places; at once, if
    none are named. Nothing of ours takes part."""
    past = DynamicCache(config=model.config)
    with torch.no_grad():
        for start, end in pairwise([0, *ends, len(tokens)]):
            asked = torch.tensor([tokens[start:end]])
            output = model(input_ids=asked, logits_to_keep=1, **cached(model, past))
    return output.logits[0, -1], past


def chunks(tokens: Sequence[int]) -> range:
    """Where a prefill in chunks pauses."""
    return range(CHUNK, len(tokens), CHUNK)


def main() -> None:
    name, url, token, file = sys.argv[1:]
    model = {**MODELS, **STATEFUL}[name]()
    prefixes = RemotePrefixes(url, token, spec_of(model))
    done = PrefixCache(model, prefixes, chunk_tokens=CHUNK).prefill(json.load(sys.stdin))
    prefixes.close()
    torch.save(done.logits, Path(file))
    print(json.dumps({"refilled": done.refilled, "columns": done.stored.columns}))


if __name__ == "__main__":
    main()
