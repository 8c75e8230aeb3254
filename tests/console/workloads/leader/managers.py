"""What a Cluster Server starts in tests: the real compiler, and managers without an engine.

python managers.py compile|run --folder F
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

ROOT = Path(__file__).parents[4]
FAKE = ROOT / "tests" / "cluster_server" / "fake_manager.py"

if __name__ == "__main__":
    if sys.argv[1] == "compile":
        sys.path.insert(0, str(ROOT))
        from workload_manager.compiler import command

        sys.exit(command.main(sys.argv[2:]))
    runpy.run_path(str(FAKE), run_name="__main__")
