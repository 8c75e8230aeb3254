#!/usr/bin/env python
"""Django's command line in a checkout; where Tidegate is installed it is `tidegate manage`."""

from __future__ import annotations

import sys

from console.manage import main

if __name__ == "__main__":
    main(sys.argv)
