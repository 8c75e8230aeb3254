"""vLLM: prefixes of prompts are stored outside the engine's own cache, and loaded instead of computed.

    vllm serve … --kv-transfer-config '{"kv_connector": "TidegateConnector", "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"tidegate": "/etc/tidegate/job7.json"}}'

vLLM makes one connector in its scheduler's process and one in each worker's. What they do is in modules
that do not import vLLM:

- `blocks`: the layout of columns in an engine's blocks; `device`: blocks in a device's memory
- `orders`: what the scheduler orders workers to do in a step, and what they report
- `scheduling`: which prefixes are loaded and stored, and when
- `worker`: the bytes: threads that load, and one that saves
- `config`: the file that an engine names; `engine_driver`: the driver that is made from it
- `plugin`: makes the connector known to an installed vLLM by its name
- `stats`: counts for vLLM's metrics; `events`: KV events of blocks

The end of processes, where vLLM does not see to it, is in `adapters.process_end`.
Only `connector` and `plugin` import vLLM. See docs/engines/vllm.md.
"""

from __future__ import annotations


def __getattr__(name: str) -> object:
    """The connector, for vLLM. Importing anything else does not need vLLM."""
    if name == "TidegateConnector":
        from swdriver_shim.adapters.vllm.connector import TidegateConnector

        return TidegateConnector
    raise AttributeError(f"module {__name__} has no {name}")
