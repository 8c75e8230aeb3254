"""A picker as a process of its own, to be killed.

`python -m tests.inference_brain.fixed_picker ENDPOINT` prints its port, and picks this endpoint for
everything.
"""

from __future__ import annotations

import asyncio
import sys

from inference_brain.picker.server import Picker
from inference_brain.picker.settings import PickerSettings
from tests.inference_brain.routers import RecordedPlace, RecordedRouter


async def main(endpoint: str) -> None:
    router = RecordedRouter(lambda asked: RecordedPlace([endpoint], asked.body))
    print(await Picker(router, PickerSettings(("127.0.0.1", 0))).start(), flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
