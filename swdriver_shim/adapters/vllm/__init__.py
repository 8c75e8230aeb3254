"""vLLM: prompts' prefixes are kept beyond the engine's own cache, and come back instead of being
computed.

    vllm serve … --kv-transfer-config '{"kv_connector": "TidegateConnector",
        "kv_connector_module_path": "swdriver_shim.adapters.vllm", "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"tidegate": "/etc/tidegate/job7.json"}}'

vLLM makes one connector in its scheduler's process and one in each worker's. What both think is in
modules that know nothing of vLLM:

- `blocks`    how columns lie in an engine's blocks
- `orders`    what the scheduler's half has workers do in a step, and what they say of it
- `scheduling` which prefixes are loaded and stored, and when
- `working`   the bytes: one thread that loads, one that saves
- `setting`   the file that says who it is for

Only `connector` imports vLLM. See docs/engines/vllm.md.
"""

from __future__ import annotations


def __getattr__(name: str) -> object:
    """vLLM asks for the connector here. Nobody else has to have vLLM."""
    if name == "TidegateConnector":
        from swdriver_shim.adapters.vllm.connector import TidegateConnector

        return TidegateConnector
    raise AttributeError(f"module {__name__} has no {name}")
