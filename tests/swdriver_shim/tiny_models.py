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
    DynamicCache,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
)

from swdriver_shim.adapters.remote import RemotePrefixes
from swdriver_shim.adapters.transformers import PrefixCache, model_spec
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
            output = model(input_ids=asked, past_key_values=past, logits_to_keep=1)
    return output.logits[0, -1], past


def chunks(tokens: Sequence[int]) -> range:
    """Where a prefill in chunks pauses."""
    return range(CHUNK, len(tokens), CHUNK)


def main() -> None:
    name, url, token, file = sys.argv[1:]
    model = MODELS[name]()
    prefixes = RemotePrefixes(url, token, spec_of(model))
    done = PrefixCache(model, prefixes, chunk_tokens=CHUNK).prefill(json.load(sys.stdin))
    prefixes.close()
    torch.save(done.logits, Path(file))
    print(json.dumps({"refilled": done.refilled, "columns": done.stored.columns}))


if __name__ == "__main__":
    main()
