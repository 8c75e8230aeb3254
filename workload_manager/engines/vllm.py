"""vLLM, with Tidegate's connector in it."""

from __future__ import annotations

import json
from typing import Final

import msgspec

from workload_manager.engines.base import SOCKET, CannotStart, Given, Launch
from workload_manager.spec import InstanceSpec

ENVIRONMENT: Final = {
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",  # weights and tokenizer are there
    # On CPUs each engine would bind itself to the same cores as its neighbors: beside one that computes,
    # a second one started for ten minutes and more. The kernel shares them out.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}


def launch(given: Given) -> Launch:
    spec = given.spec
    if given.weights is None:
        raise CannotStart("vLLM needs weights.")
    tokenizer = ("--tokenizer", str(given.tokenizer)) if given.tokenizer else ()
    command = (
        *(given.programs.vllm_python, "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", str(given.weights), "--served-model-name", spec.model),
        *("--max-model-len", str(spec.tokens_max), "--uds", str(SOCKET)),
        # Without it, vLLM kills the process of its driver at once, before that leaves its note.
        *("--shutdown-timeout", str(max(1, int(given.stop_seconds)))),
        *tokenizer,
        *_connector(given),
        *spec.engine.arguments,
    )
    return Launch(command, given.origin, SOCKET, environment={**ENVIRONMENT, **spec.engine.environment})


def _connector(given: Given) -> tuple[str, ...]:
    if given.join is None:
        return ()
    told = {**msgspec.to_builtins(given.join), **_weights_name(given.spec)}
    return (
        "--kv-transfer-config",
        json.dumps(
            {
                "kv_connector": "TidegateConnector",
                # By name it is found only where the wheel is installed beside vLLM.
                "kv_connector_module_path": "swdriver_shim.adapters.vllm",
                "kv_role": "kv_both",
                "kv_load_failure_policy": "recompute",
                "kv_connector_extra_config": {"tidegate": told},
            }
        ),
    )


def _weights_name(spec: InstanceSpec) -> dict[str, dict[str, str]]:
    """By what engines share KV. Without a revision the connector names the files that vLLM loads."""
    if spec.weights is None or not spec.weights.revision:
        return {}
    return {"model": {"name": spec.model, "revision": spec.weights.revision}}
