"""`python -m tests.workload_manager.weights.until_half ENDPOINT SOURCE STORE`: brings weights until
about half of them are there, says so, and then waits to be killed."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

from tests.kvss_agent.tier2.bucket import CREDENTIALS
from workload_manager.spec import WeightsSpec
from workload_manager.weights.download import Download
from workload_manager.weights.progress import Progress
from workload_manager.weights.sources import Bucket

RANGE_BYTES = 64 << 10


def shown() -> dict[str, str]:
    return {
        "access_key_id": CREDENTIALS["AWS_ACCESS_KEY_ID"],
        "secret_access_key": CREDENTIALS["AWS_SECRET_ACCESS_KEY"],
    }


def main() -> None:
    endpoint, source, store = sys.argv[1:]

    def report(progress: Progress) -> None:
        if progress.done * 2 >= progress.total:
            print("half", flush=True)
            threading.Event().wait()

    bucket = Bucket(WeightsSpec(source=source, endpoint=endpoint), shown())
    Download(bucket, Path(store), {}, report, lambda: False, RANGE_BYTES).run()


if __name__ == "__main__":
    main()
