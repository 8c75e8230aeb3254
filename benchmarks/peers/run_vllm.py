"""vLLM's prefix cache, as its scheduler asks it: a request, which hashes its blocks, and a look-up.

`KVCacheManager` and all below it are vLLM's own; no engine is started, since none of this needs one. In
the measured time are: the `Request` with the hashes of its blocks, `get_computed_blocks`, and `touch`,
which keeps the blocks as allocation would. The package is a rebuild for CPUs of the same Python code.
"""

from __future__ import annotations

import os
from typing import Any

from benchmarks.peers.matching import Matcher, prompt, run

# By variant: the hash (sha256 is vLLM's default, xxhash its fastest), and tokens in a block (16 is).
VARIANTS = {
    "": ("sha256", 64),
    "xxhash": ("xxhash", 64),
    "block16": ("sha256", 16),
    "block16.xxhash": ("xxhash", 16),
}
QUIET = {
    "VLLM_TARGET_DEVICE": "cpu",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
}
SPARE = 2  # prompts: for a request that goes on, and for one that is stored


class Vllm(Matcher):
    def start(self) -> None:
        os.environ.update(QUIET)
        import torch
        from vllm.sampling_params import SamplingParams
        from vllm.utils.hashing import get_hash_fn_by_name
        from vllm.v1 import kv_cache_interface
        from vllm.v1.core import kv_cache_manager, kv_cache_utils
        from vllm.v1.request import Request

        self.hash_of, self.utils, self.cache = get_hash_fn_by_name, kv_cache_utils, kv_cache_interface
        self.new_manager, self.new_request = kv_cache_manager.KVCacheManager, Request
        self.dtype, self.sampling = torch.bfloat16, SamplingParams(max_tokens=1)
        self.managers: dict[str, Any] = {}
        self.hashers: dict[str, Any] = {}
        self.requests = 0

    def fill(self, prompts: int, tokens: int) -> dict[str, str | None]:
        self.utils.init_none_hash(self.hash_of("sha256"))  # what comes before the first block
        for variant, (algorithm, block) in VARIANTS.items():
            self.managers[variant] = self._manager((prompts + SPARE) * tokens // block, block)
            self.hashers[variant] = self.utils.get_request_block_hasher(block, self.hash_of(algorithm))
            self.use(variant)
            for number in range(prompts):
                request = self._request(prompt(number, tokens))
                if self.manager.allocate_slots(request, tokens) is None:
                    raise RuntimeError("no room for a prompt")
                self.manager.free(request)
        return dict.fromkeys(VARIANTS)

    def _manager(self, blocks: int, block: int) -> Any:
        spec = self.cache.FullAttentionSpec(
            block_size=block, num_kv_heads=1, head_size=1, dtype=self.dtype
        )
        group = self.cache.KVCacheGroupSpec(["layer"], spec)
        config = self.cache.KVCacheConfig(
            num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=[group]
        )
        return self.new_manager(
            config, max_model_len=1 << 20, scheduler_block_size=block, hash_block_size=block
        )

    def use(self, variant: str) -> None:
        self.manager, self.hasher = self.managers[variant], self.hashers[variant]

    def cold(self, tokens: list[int]) -> int:
        self.request = self._request(tokens)
        return self._look_up()

    def continued(self, more: list[int]) -> int:
        self.request.append_output_token_ids(more)
        return self._look_up()

    def _request(self, tokens: list[int]) -> Any:
        self.requests += 1
        return self.new_request(
            str(self.requests), tokens, self.sampling, None, block_hasher=self.hasher
        )

    def _look_up(self) -> int:
        found, count, _ = self.manager.get_computed_blocks(self.request)
        self.held = found.blocks[0]
        self.manager.block_pool.touch(self.held)
        return int(count)

    def release(self) -> None:
        self.manager.block_pool.free_blocks(reversed(self.held))


if __name__ == "__main__":
    run(Vllm)
