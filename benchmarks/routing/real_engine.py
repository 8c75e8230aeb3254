"""A real vLLM on the CPU, one step at a time: what each step has done, and how long it took.

It runs in the environment of engines. The model is small, with random weights: what matters is how the
time of a step depends on what is in it. It has one thread, and its time is the processor's, so that
other work on the machine hardly matters.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

SHAPE: Final = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 688,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "num_hidden_layers": 4,
    "max_position_embeddings": 16_384,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
TOKENS_MAX: Final = 8192
STEP_TOKENS: Final = 2048
RUNNING_MAX: Final = 64
QUIET: Final = {
    "VLLM_TARGET_DEVICE": "cpu",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # steps are made here, when they are asked for
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}


class Step(NamedTuple):
    """What a step has computed: prompt tokens, pairs of their attention, running requests, and tokens
    before theirs."""

    tokens: int
    pairs: float
    running: int
    contexts: int
    seconds: float


class RealEngine:
    def __init__(self, folder: Path) -> None:
        os.environ.update(QUIET)
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM
        from vllm import LLM, SamplingParams

        torch.manual_seed(7)
        LlamaForCausalLM(LlamaConfig(**SHAPE)).save_pretrained(folder)
        self._sampling = SamplingParams
        engine = LLM(
            model=str(folder),
            dtype="float32",
            max_model_len=TOKENS_MAX,
            max_num_batched_tokens=STEP_TOKENS,
            max_num_seqs=RUNNING_MAX,
            enforce_eager=True,
            enable_prefix_caching=True,
            skip_tokenizer_init=True,
            seed=0,
        )
        self._engine: Any = engine.llm_engine
        self._scheduler: Any = self._engine.engine_core.engine_core.scheduler
        self._scheduled: dict[str, int] = {}
        self._before: dict[str, int] = {}
        self._prompts: dict[str, int] = {}
        schedule = self._scheduler.schedule

        def scheduled(*arguments: object) -> Any:
            found = schedule(*arguments)
            self._scheduled = dict(found.num_scheduled_tokens)
            self._before = {
                name: self._scheduler.requests[name].num_computed_tokens - count
                for name, count in self._scheduled.items()
            }
            self._prompts = {
                name: self._scheduler.requests[name].num_prompt_tokens for name in self._scheduled
            }
            return found

        self._scheduler.schedule = scheduled

    def ask(self, name: str, tokens: Sequence[int], output: int) -> None:
        sampling = self._sampling(max_tokens=output, temperature=0.0, ignore_eos=True, detokenize=False)
        self._engine.add_request(name, {"prompt_token_ids": list(tokens)}, sampling)

    @property
    def is_busy(self) -> bool:
        return bool(self._engine.has_unfinished_requests())

    def step(self) -> tuple[Step, dict[str, int]]:
        """One step, and how many tokens of its answer each request has by now."""
        self._scheduled = {}
        began = time.process_time()
        outputs = self._engine.step()
        seconds = time.process_time() - began
        tokens = running = contexts = 0
        pairs = 0.0
        for name, count in self._scheduled.items():
            before = self._before[name]
            if before < self._prompts[name]:
                tokens += count
                pairs += count * (before + (count + 1) / 2)
            else:
                running += 1
                contexts += before
        answers = {one.request_id: len(one.outputs[0].token_ids) for one in outputs}
        return Step(tokens, pairs, running, contexts, seconds), answers
