"""Weights on this machine: checked on a mount, or brought from a bucket.

    folder = prepare(spec, credentials, store, report, is_cancelled)

Blocks until all is there; for a thread. Replicas of one machine share what one of them has brought.
"""

from __future__ import annotations

from workload_manager.weights.errors import WeightsError
from workload_manager.weights.preparation import prepare
from workload_manager.weights.progress import Progress

__all__ = ["Progress", "WeightsError", "prepare"]
