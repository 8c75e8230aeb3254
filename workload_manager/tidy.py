"""`python -m workload_manager tidy`: once, for the folder in MANAGER_STATE_DIR. The Cluster Server
calls it also where no manager runs any more."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from swdriver_shim.adapters.join_config import default_state_dir
from workload_manager import left_drivers
from workload_manager.manager import DRIVERS


def main() -> int:
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
    state_dir = Path(os.environ.get("MANAGER_STATE_DIR") or default_state_dir())
    left_drivers.delete_left(state_dir / DRIVERS)
    return 0
