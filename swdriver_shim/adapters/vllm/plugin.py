"""What vLLM calls in each of its processes, where Tidegate is installed beside it.

It finds `register` as an entry point (`vllm.general_plugins` in pyproject.toml). From then on
connector and tier are known by name, as vLLM's own are. They are imported when they are used.
"""

from __future__ import annotations

import contextlib
from importlib.util import find_spec


def register() -> None:
    """Make `TidegateConnector` and `KvssTier` known to this process. Any number of times."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    with contextlib.suppress(ValueError):  # it is registered: the plugins were loaded before
        KVConnectorFactory.register_connector(
            "TidegateConnector", "swdriver_shim.adapters.vllm", "TidegateConnector"
        )
    # Earlier versions have no such tiers, and an exception of a plugin ends vLLM, whoever uses Tidegate.
    if find_spec("vllm.v1.kv_offload") and find_spec("vllm.v1.kv_offload.tiering"):
        from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

        with contextlib.suppress(ValueError):
            SecondaryTierFactory.register_tier(
                "KvssTier", "swdriver_shim.adapters.vllm_tier", "KvssTier"
            )
