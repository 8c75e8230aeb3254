"""How KV lies in the shards of a driver, for engines that are not running: pure.

`emulated` is what the emulator's own driver reports, and what a plan counts with. For real engines see
`compiler.shapes`.
"""

from __future__ import annotations

import hashlib
from typing import Final

from swdriver_shim.desired import GroupSpec, ModelSpec
from swdriver_shim.layout import SHARDS_MAX
from workload_manager.spec import EmulatorSpec

FORMAT: Final = "emulator.1"  # of what is in a column
FULL: Final = "full"
WINDOW: Final = "window"


def emulated(model: str, revision: str, spec: EmulatorSpec, boxes: int = 1) -> ModelSpec:
    """The model as the emulator has it: a shard for each domain of each box, in this order, for the
    full group and, with `window_tokens`, for the group with a window. Raises ValueError."""
    shards = spec.domains * boxes
    if boxes < 1 or shards > SHARDS_MAX:
        raise ValueError(f"an engine has 1 to {SHARDS_MAX // spec.domains} boxes, not {boxes}")
    sizes = (spec.bytes_per_token,) * shards
    groups = [GroupSpec(name=FULL, bytes_per_token=sizes)]
    if spec.window_tokens:
        groups.append(GroupSpec(name=WINDOW, bytes_per_token=sizes, window=spec.window_tokens))
    said = repr([(group.name, group.bytes_per_token, group.window) for group in groups])
    return ModelSpec(
        name=model,
        revision=revision,
        kv_dtype="emulated",
        layout=f"{FORMAT}:{hashlib.sha256(said.encode()).hexdigest()[:32]}",
        groups=tuple(groups),
    )
