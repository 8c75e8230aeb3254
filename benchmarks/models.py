"""What a refilled prefix saves real models, of random weights, on the CPU: `make bench-models`.

Each prompt is served when nothing is stored of it, and when all but its end is, with an agent that is a
process of its own. Both times end with the logits of the last token, and with all of it stored.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Iterator
from typing import Any, Final

import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)

from benchmarks.harness import Row, options, progress, show
from swdriver_shim.adapters.transformers import Prefilled, PrefixCache, model_spec
from swdriver_shim.daemon.binary import run_heads
from swdriver_shim.driver import Driver
from swdriver_shim.keys import COLUMN_TOKENS, Keys
from swdriver_shim.prefixes import LocalPrefixes
from swdriver_shim.replay import fleet

PROMPTS: Final = (1024, 4096)
QUICK_PROMPTS: Final = (1024,)
REST: Final = 64  # tokens behind the prefix that is stored, which are computed either way
WINDOW: Final = 512
ROUNDS: Final = 5
VOCABULARY: Final = 8_000
ROUNDING: Final = 0.001  # of logits, between one way to sum up and another
SHAPE: Final[dict[str, Any]] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 384,
    "intermediate_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 8192,
}
KINDS: Final = ["sliding_attention"] * 3 + ["full_attention"]


def models() -> Iterator[tuple[str, Any]]:
    torch.manual_seed(7)
    yield "llama", LlamaForCausalLM(LlamaConfig(**SHAPE)).eval()
    yield "mistral", MistralForCausalLM(MistralConfig(sliding_window=WINDOW, **SHAPE)).eval()
    more = {"sliding_window": WINDOW, "layer_types": 2 * KINDS, "query_pre_attn_scalar": 64}
    yield "gemma3", Gemma3ForCausalLM(Gemma3TextConfig(**SHAPE, **more)).eval()


def rows_of(name: str, model: Any, prompts: tuple[int, ...]) -> list[Row]:
    spec = model_spec(model.config, model.dtype, name, "random")
    shape, rows = spec.shape(), []
    slots = 2 * (max(prompts) // COLUMN_TOKENS + 2)
    with fleet.started(shape, slots, 1) as agents:
        driver = Driver(shape, name, agents.shards())
        try:
            cache = PrefixCache(model, LocalPrefixes(driver, Keys("bench", bytes(32), spec.namespace())))
            for length in prompts:
                rows += prompt_rows(f"{name}.{length}", driver, cache, length)
        finally:
            driver.close()
    return rows


def prompt_rows(name: str, driver: Driver, cache: PrefixCache, length: int) -> list[Row]:
    cold, warm = [], []
    for turn in range(ROUNDS):
        torch.manual_seed(turn)
        tokens = torch.randint(VOCABULARY, (length,)).tolist()
        other_end = [*tokens[: length - REST], *reversed(tokens[length - REST :])]
        cold.append(cache.prefill(tokens))
        warm.append(cache.prefill(other_end))
        assert (cold[-1].refilled, warm[-1].refilled) == (0, length - REST)
        assert driver.removals.purge("bench").done
        if not turn:
            right = cache.prefill(other_end)
            assert right.refilled == 0
            assert (right.logits - warm[-1].logits).abs().max() < ROUNDING, "other logits"
            assert driver.removals.purge("bench").done
    whole, rest = median_ms(cold, "seconds"), median_ms(warm, "seconds")
    refilled = sum(run.bytes for run in run_heads(driver.layout, length - REST))
    return [
        Row(f"{name}.prefill", whole, "ms"),
        Row(f"{name}.prefill.refilled", rest, "ms", f"{name}.prefill", whole / rest, 1.0),
        Row(f"{name}.refill", median_ms(warm, "refill_seconds"), "ms"),
        Row(f"{name}.refill.bytes", refilled / 1e6, "MB"),
        Row(f"{name}.store", median_ms(cold, "store_seconds"), "ms"),
    ]


def median_ms(done: list[Prefilled], figure: str) -> float:
    return 1e3 * statistics.median([float(getattr(one, figure)) for one in done])


def main() -> None:
    given = options(__doc__)
    torch.set_num_threads(1)  # two wait for each other where others use the cores as well
    rows: list[Row] = []
    for name, model in models():
        progress(name)
        rows += rows_of(name, model, QUICK_PROMPTS if given.quick else PROMPTS)
        del model
        gc.collect()
    show("Models", rows, given.json)


if __name__ == "__main__":
    main()
