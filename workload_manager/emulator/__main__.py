from __future__ import annotations

import sys

from telemetry.garbage import loading

if __name__ == "__main__":
    with loading():
        from workload_manager.emulator.command import main

    sys.exit(main(sys.argv[1:]))
