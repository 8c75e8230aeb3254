"""A real vLLM on the CPU, with a small model of random weights, and whatever cache it is told to use.

    {"op": "open", "connector": {…} | null, "prefixes": false}     -> {"started": 9.8}
    {"op": "ask", "number": 7, "tokens": 4096}       -> {"seconds": 0.8, "cached": 0, "token": 17}
    {"op": "serve", "numbers": [1, 2], "tokens": 4096, "more": 64, "output": 16, "turn": 1}
                                                               -> {"seconds": 2.5, …}

`ask` is the time to the first token of one prompt, `serve` that of some at once, to their last.
A prompt is its number, so the same number is the same prompt in every engine. The model is never loaded:
vLLM makes up its weights, the same in each process.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.peers.protocol import Part, run_with

VOCABULARY = 8_000
TOKENS_MAX = 8_192 + 1_024
BLOCK_TOKENS = 32
MODEL: Mapping[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCABULARY,
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 2 * TOKENS_MAX,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000.0,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
SURROUNDINGS = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # one process less, the same for all
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "LMCACHE_TRACK_USAGE": "false",
    "LMCACHE_DISABLE_BANNER": "1",
    "LMCACHE_LOG_LEVEL": "ERROR",
    "LMCACHE_MP_TRANSFER_MODE": "engine_driven",
    "NO_GPU_EXT": "1",
}


class Engine(Part):
    def start(self) -> None:
        """Nothing yet: `open` says what it is to be."""
        os.environ.update(SURROUNDINGS)

    def open(self, connector: Mapping[str, Any] | None, prefixes: bool) -> None:  # noqa: FBT001
        model = self.scratch / "model"
        model.mkdir()
        (model / "config.json").write_text(json.dumps(MODEL))
        if connector and "LMCache" in connector["kv_connector"]:
            _let_llvmlite_be_looked_at()
        if connector and "Mooncake" in connector["kv_connector"]:
            _have_no_events()
        from vllm import LLM, SamplingParams
        from vllm.config import KVTransferConfig

        self.parameters = SamplingParams
        self.llm = LLM(
            model=str(model),
            load_format="dummy",
            skip_tokenizer_init=True,
            dtype="bfloat16",
            max_model_len=TOKENS_MAX,
            max_num_batched_tokens=TOKENS_MAX,  # ExampleConnector knows no prompts in pieces
            block_size=BLOCK_TOKENS,
            enforce_eager=True,
            enable_prefix_caching=prefixes,
            disable_log_stats=True,
            kv_transfer_config=KVTransferConfig(**connector) if connector else None,
        )

    def serve_all(
        self, prompts: list[list[int]], output: int, params: Mapping[str, Any] | None
    ) -> tuple[float, list[Any]]:
        asked = [{"prompt_token_ids": prompt} for prompt in prompts]
        sampling = self.parameters(
            max_tokens=output,
            temperature=0,
            ignore_eos=True,
            detokenize=False,
            extra_args={"kv_transfer_params": params} if params else None,
        )
        began = time.perf_counter()
        done = self.llm.generate(asked, sampling, use_tqdm=False)
        return time.perf_counter() - began, done

    def close(self) -> None:
        if hasattr(self, "llm"):
            with contextlib.suppress(Exception):  # on the way out
                self.llm.llm_engine.engine_core.shutdown()
        super().close()


class Runner:
    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def on_open(self, connector: Mapping[str, Any] | None, prefixes: bool) -> dict[str, Any]:  # noqa: FBT001
        began = time.perf_counter()
        self.engine.open(connector, prefixes)
        return {"started": time.perf_counter() - began}

    def on_ask(
        self, number: int, tokens: int, params: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        seconds, [done] = self.engine.serve_all([prompt(number, tokens)], 1, params)
        return {
            "seconds": seconds,
            "cached": done.num_cached_tokens or 0,
            "token": done.outputs[0].token_ids[0],
        }

    def on_serve(
        self,
        numbers: list[int],
        tokens: int,
        more: int,
        output: int,
        turn: int,
        params: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Conversations of so many tokens, each with `more` of its own in this turn."""
        prompts = [prompt(number, tokens) + prompt(1000 * turn + number + 1, more) for number in numbers]
        seconds, done = self.engine.serve_all(prompts, output, params)
        return {
            "seconds": seconds,
            "cached": sum(one.num_cached_tokens or 0 for one in done),
            "tokens": [list(one.outputs[0].token_ids) for one in done],
        }


def prompt(number: int, tokens: int) -> list[int]:
    noise = random.Random(number)
    return [noise.randrange(3, VOCABULARY) for _ in range(tokens)]


def _let_llvmlite_be_looked_at() -> None:
    """LMCache imports numba, and vLLM looks through all modules for attributes called `kernel`: it takes
    llvmlite's way of finding functions for a dictionary."""
    from llvmlite.binding import ffi  # type: ignore[import-not-found]

    ffi._lib_fn_wrapper.get = lambda *_: None  # noqa: SLF001


def _have_no_events() -> None:
    """Mooncake's connector waits for the GPU by CUDA's events, of which a CPU has none: it has computed
    when it is asked."""
    import torch

    class Nothing:
        def record(self, *_: object) -> None:
            """It is done."""

        wait = synchronize = record

        def query(self) -> bool:
            return True

    torch.cuda.Event = Nothing


if __name__ == "__main__":
    run_with(lambda scratch: Engine(Path(scratch)), Runner)
