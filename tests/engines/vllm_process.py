"""A real vLLM in a process of its own, on a small model with seeded random weights.

    python -m tests.engines.vllm_process DIRECTORY OPTIONS

It builds the model that OPTIONS name, if it is not in DIRECTORY, starts the engine, and answers each
line of JSON with one.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any, Final

QUIET: Final = {
    "VLLM_TARGET_DEVICE": "cpu",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "OMP_NUM_THREADS": "1",  # sums are split up by threads, and processes beside each other share cores
}
STOP_SECONDS: Final = 60.0  # vLLM's own 5 are too few on a busy machine: who is killed leaves no notes
VOCABULARY: Final = 512
SHAPE: Final[dict[str, Any]] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 4096,
    "initializer_range": 0.15,  # with the usual 0.02 a small model hardly looks at what came before
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def build(kind: str, directory: Path) -> None:
    """A model of this kind: `llama` looks at everything, `mistral` at a window, `gemma3` at both."""
    import torch
    from transformers import (
        Gemma3ForCausalLM,
        Gemma3TextConfig,
        LlamaConfig,
        LlamaForCausalLM,
        MistralConfig,
        MistralForCausalLM,
    )

    torch.manual_seed(7)
    model: Any
    if kind == "llama":
        model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=3, **SHAPE))
    elif kind == "mistral":
        model = MistralForCausalLM(MistralConfig(num_hidden_layers=3, sliding_window=256, **SHAPE))
    else:
        layers = ["sliding_attention", "sliding_attention", "full_attention"] * 2
        config = Gemma3TextConfig(
            num_hidden_layers=len(layers), sliding_window=256, layer_types=layers, **SHAPE
        )
        model = Gemma3ForCausalLM(config)
    model.save_pretrained(directory)


class Engine:
    def __init__(self, directory: Path, options: dict[str, Any]) -> None:
        from vllm import LLM
        from vllm.config import KVEventsConfig, KVTransferConfig

        kind, setting = options.pop("model"), options.pop("setting", None)
        staged = options.pop("staged", False)
        if events := options.get("kv_events_config"):
            options["kv_events_config"] = KVEventsConfig(**events)
        model = directory / kind
        if not model.exists():
            build(kind, model)
        connector = KVTransferConfig(
            kv_connector="TidegateConnector",
            kv_connector_module_path="swdriver_shim.adapters.vllm",
            kv_role="kv_both",
            kv_load_failure_policy=options.pop("on_failure", "recompute"),
            kv_connector_extra_config={"tidegate": setting, "staged": staged},
        )
        usual = {
            "dtype": "float32",
            "max_model_len": 2048,
            "enforce_eager": True,
            "enable_prefix_caching": False,
            "block_size": 32,
            "seed": 0,
            "skip_tokenizer_init": True,
            "disable_log_stats": False,
        }
        self.told: dict[str, list[str]] = {"stored": [], "removed": []}
        self.llm = LLM(
            model=str(model),
            kv_transfer_config=connector if setting else None,
            **{**usual, **options},
        )
        if events:
            self._listen()

    def close(self) -> None:
        self.llm.llm_engine.engine_core.shutdown(timeout=STOP_SECONDS)

    def generate(
        self, prompts: list[list[int]], claims: list[str | None], tokens: int
    ) -> list[dict[str, Any]]:
        done = self.llm.generate(
            [{"prompt_token_ids": one} for one in prompts],
            [sampling(claim, tokens) for claim in claims],
            use_tqdm=False,
        )
        return [
            {
                "tokens": list(one.outputs[0].token_ids),
                "cached": one.num_cached_tokens,
                "reason": one.outputs[0].finish_reason,
            }
            for one in done
        ]

    def give_up_in_a_load_that_fails(self, prompt: list[int], claim: str) -> int:
        """How many requests that was."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group
        from vllm.v1.request import RequestStatus

        from kvss_agent.client import Miss
        from swdriver_shim.data_plane.shard.reads import ColumnViews

        engine = self.llm.llm_engine
        scheduler = engine.engine_core.engine_core.scheduler
        worker = get_kv_transfer_group()._worker
        shard, computed = worker.shard(0), worker.computed
        given_up: list[str] = []

        def computing(step: Any) -> None:
            computed(step)
            if step.loads:
                given_up.extend(scheduler.requests)
                scheduler.finish_requests(set(given_up), RequestStatus.FINISHED_ABORTED)

        worker.computed, shard.view = (
            computing,
            lambda looks: ColumnViews([Miss.CORRUPT] * len(looks), ()),
        )
        try:
            engine.add_request("given up", {"prompt_token_ids": prompt}, sampling(claim, 12))
            while scheduler.has_requests():
                engine.step()
        finally:
            del worker.computed, shard.view
        engine.abort_request(["given up"])
        return len(given_up)

    def forget_blocks(self) -> bool:
        """Of vLLM's own cache."""
        return bool(self.llm.llm_engine.reset_prefix_cache())

    def reset(self) -> bool:
        return bool(self.llm.llm_engine.reset_prefix_cache(reset_connector=True))

    def events(self) -> dict[str, list[str]]:
        """Of the connector, so far: the blocks of each, by their hashes."""
        list(self.connector.take_events())
        return self.told

    def _listen(self) -> None:
        """To what the connector gives to vLLM's scheduler."""
        self.connector = self.llm.llm_engine.engine_core.engine_core.scheduler.connector
        take = self.connector.take_events

        def taking() -> list[Any]:
            taken = list(take())
            for one in taken:
                kind = "stored" if type(one).__name__ == "BlockStored" else "removed"
                self.told[kind].append(repr(one.block_hashes))
            return taken

        self.connector.take_events = taking

    def steps_overlap(self) -> bool:
        return bool(self.llm.llm_engine.vllm_config.scheduler_config.async_scheduling)

    def preemptions(self) -> int:
        found = [one for one in self.llm.get_metrics() if one.name == "vllm:num_preemptions"]
        return int(found[0].value)

    def metrics(self) -> dict[str, float]:
        """Of the connector's, in vLLM's own registry."""
        return {
            f"{one.name} {one.labels['kind']}": one.value
            for one in self.llm.get_metrics()
            if "tidegate" in one.name and hasattr(one, "value")
        }


def sampling(claim: str | None, tokens: int) -> Any:
    from vllm import SamplingParams

    return SamplingParams(
        max_tokens=tokens,
        temperature=0,
        ignore_eos=True,
        detokenize=False,
        extra_args={"kv_transfer_params": {"tidegate": claim}} if claim else None,
    )


def main() -> None:
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    engine = Engine(Path(sys.argv[1]), json.loads(sys.argv[2]))
    said = os.fdopen(int(sys.argv[3]), "w", buffering=1)
    said.write('"ready"\n')
    for line in sys.stdin:
        asked = json.loads(line)
        began = time.perf_counter()
        answer = getattr(engine, asked["verb"])(*asked["arguments"])
        said.write(json.dumps({"answer": answer, "seconds": time.perf_counter() - began}) + "\n")
    engine.close()


if __name__ == "__main__":
    main()
