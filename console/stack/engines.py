"""Real engines beside a stack: `make up ENGINE=vllm`. They have an environment of their own."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Final

from console.environment import IS_CHECKOUT, PROJECT, Environment
from console.stack.errors import StackError

ENGINES: Final = ("vllm",)
VLLM_PYTHON: Final = (
    "MANAGER_VLLM_PYTHON"  # a setting of managers, and of people who have their own vLLM
)
INSTALLED: Final = PROJECT / ".tidegate" / "engines"  # by `make engines-environment`


def environment(given: Mapping[str, str]) -> dict[str, str]:
    """What managers are told of where engines are. Also of a stack that was not asked for one: workloads
    of earlier starts go on."""
    if VLLM_PYTHON in given or not (INSTALLED / ".engines-installed").is_file():
        return {}
    return {VLLM_PYTHON: str(INSTALLED / "bin" / "python")}


def check(given: Mapping[str, str], settings: Environment) -> None:
    """Raises StackError where no real engine can be started."""
    if not settings.demo:
        raise StackError(
            "A real engine is served in the demo's fleet, and TIDEGATE_DEMO leaves the demo out.",
            exit_code=os.EX_CONFIG,
        )
    if "TIDEGATE_CLUSTER_URL" in given:
        raise StackError(
            "A real engine is started by the Cluster Server of this stack, and TIDEGATE_CLUSTER_URL "
            "names another one.",
            exit_code=os.EX_CONFIG,
        )
    if VLLM_PYTHON not in given and not environment(given):
        how = "`make engines-environment` installs it, or " if IS_CHECKOUT else ""
        raise StackError(f"There is no vLLM here: {how}{VLLM_PYTHON} names a Python that has it.")
