"""What `make up ENGINE=vllm` adds to the demo: a workload with a real vLLM on the processor, on a box of
its own. It is made once, and stays until somebody deletes it.
"""

from __future__ import annotations

from typing import Any, Final

from django.conf import settings
from django.db import transaction

from console.accounts.principal import SYSTEM
from console.demo import places, story, tiny_llama
from console.fleet.descriptions import changes, document
from console.fleet.descriptions.document import BOX, LEAF
from console.fleet.services import lock_fleet
from console.workloads import changes as workloads
from console.workloads.models import Workload
from console.workloads.spec import TokenizerSource, WorkloadSpec
from workload_manager.spec import EngineSpec, WeightsSpec

REASON: Final = "make up ENGINE=vllm"
NAME: Final = "vllm"
BOX_NAME: Final = "cs-4"
TOKENS_MAX: Final = 2048
JOINING_SECONDS_MAX: Final = 3600
ARGUMENTS: Final = (
    *("--dtype", "float32", "--block-size", "32", "--enforce-eager"),
    # What hits comes from the cache that is shared, and can be seen in the answer.
    *("--no-enable-prefix-caching", "--enable-prompt-tokens-details"),
)
ENVIRONMENT: Final = {
    "VLLM_TARGET_DEVICE": "cpu",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_LOGGING_LEVEL": "WARNING",
    "OMP_NUM_THREADS": "1",  # it is small, and others run beside it
}


@transaction.atomic
def serve() -> bool:
    """Create the workload, unless it is there. Returns whether it was created. Raises
    CannotPlan and others of `workloads.create`."""
    lock_fleet()
    if Workload.objects.filter(name=NAME).exists():
        return False
    folder = places.tiny_llama(settings.STATE_DIR).resolve()
    tiny_llama.write(folder)
    _add_box()
    spec = WorkloadSpec(
        name=NAME,
        model=places.VLLM_MODEL,
        tokens_max=TOKENS_MAX,
        engine=EngineSpec(kind="vllm", arguments=ARGUMENTS, environment=ENVIRONMENT),
        weights=WeightsSpec(source=str(folder)),
        tokenizer=TokenizerSource(folder=str(folder)),
    )
    workloads.create(SYSTEM, spec, wait_seconds=JOINING_SECONDS_MAX, reason=REASON)
    return True


def _add_box() -> None:
    """To the fleet of the demo, as far as that is still the demo's."""
    things = changes.current()
    if (BOX, BOX_NAME) in things or (LEAF, story.LEAVES[0]) not in things:
        return
    demo = document.parse(story.fleet(places.tier2(settings.STATE_DIR)))
    box: dict[str, Any] = {**demo[BOX, story.BOXES[0]], "stamp": things[LEAF, story.LEAVES[0]]["stamp"]}
    changes.apply(SYSTEM, document.dump({**things, (BOX, BOX_NAME): box}), reason=REASON)
