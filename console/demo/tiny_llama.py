"""A small model with random weights, in the files that engines load: what `make up ENGINE=vllm` serves.

It computes as a Llama does, and what it says means nothing: words of the demo's tokenizer.
"""

from __future__ import annotations

import json
import math
import struct
from array import array
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any, Final

from console.demo import tokenizer
from kvss_agent.process.durable_file import write_durably

SEED: Final = 7
TOKENS_MAX: Final = 4096
HIDDEN: Final = 128
INNER: Final = 256
LAYERS: Final = 3
HEADS: Final = 4
KV_HEADS: Final = 2
HEAD: Final = 32
DEVIATION: Final = 0.15  # with the usual 0.02 so small a model hardly looks at what came before
CONFIG: Final = "config.json"


def write(folder: Path) -> None:
    """The folder is made once, and left as it is then."""
    if (folder / CONFIG).exists():
        return
    tokenizer.write(folder)
    words = tokenizer.vocabulary()
    about = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": tokenizer.MESSAGE_END,
        "model_max_length": TOKENS_MAX,
        "chat_template": tokenizer.TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(about))
    (folder / "model.safetensors").write_bytes(b"".join(_safetensors(len(words))))
    config = json.dumps(_config(len(words), words[tokenizer.MESSAGE_END]), indent=2)
    write_durably(folder / CONFIG, config.encode())  # last: then all is there


def _config(vocabulary: int, end: int) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float32",
        "vocab_size": vocabulary,
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD,
        "hidden_act": "silu",
        "max_position_embeddings": TOKENS_MAX,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "bos_token_id": end,
        "eos_token_id": end,
    }


def _shapes(vocabulary: int) -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocabulary, HIDDEN),
        "model.norm.weight": (HIDDEN,),
    }
    for layer in range(LAYERS):
        at = f"model.layers.{layer}"
        found |= {
            f"{at}.input_layernorm.weight": (HIDDEN,),
            f"{at}.post_attention_layernorm.weight": (HIDDEN,),
            f"{at}.self_attn.q_proj.weight": (HEADS * HEAD, HIDDEN),
            f"{at}.self_attn.k_proj.weight": (KV_HEADS * HEAD, HIDDEN),
            f"{at}.self_attn.v_proj.weight": (KV_HEADS * HEAD, HIDDEN),
            f"{at}.self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD),
            f"{at}.mlp.gate_proj.weight": (INNER, HIDDEN),
            f"{at}.mlp.up_proj.weight": (INNER, HIDDEN),
            f"{at}.mlp.down_proj.weight": (HIDDEN, INNER),
        }
    return found


def _safetensors(vocabulary: int) -> Iterator[bytes]:
    """The format: the size of a header in JSON, the header, then all numbers in its order."""
    shapes = _shapes(vocabulary)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        begin, end = end, end + 4 * math.prod(shape)
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [begin, end]}
    told = json.dumps(header).encode()
    told += b" " * (-len(told) % 8)
    yield struct.pack("<Q", len(told))
    yield told
    randomness = Random(SEED)  # noqa: S311 - a model, no secret
    for shape in shapes.values():
        yield _numbers(math.prod(shape), randomness if len(shape) > 1 else None)


def _numbers(count: int, randomness: Random | None) -> bytes:
    """Evenly between two bounds, which is random enough and ten times as fast; of norms, ones."""
    if randomness is None:
        return struct.pack("<f", 1.0) * count
    width = DEVIATION * math.sqrt(12)
    number = randomness.random
    return array("f", [width * (number() - 0.5) for _ in range(count)]).tobytes()
