#!/usr/bin/env python
"""Django's command line in a checkout; where Tidegate is installed it is `tidegate manage`."""

from __future__ import annotations

import sys

from console.manage import main
from telemetry.script import begin

if __name__ == "__main__":
    sys.exit(begin(lambda: main(sys.argv)))
