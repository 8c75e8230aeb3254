"""One driver that evicts or refills columns of 1 MiB as fast as it can: `WHAT SECONDS` on its input,
bytes a second on its output."""

from __future__ import annotations

import secrets
import sys
import time

from kvss_agent.client import Credentials, Wanted, connect
from kvss_agent.shard.seal import Column

SIZE = 1 << 20
KEY, TAG = b"k" * 16, b"t" * 16


def main(address: str, name: str, driver: str, secret: str) -> None:
    credentials = Credentials(driver, bytes.fromhex(secret))
    with connect(address, name, credentials, transport="stream") as shard:
        block = bytearray(secrets.token_bytes(SIZE))
        memory = memoryview(bytearray(block * shard.slots))
        columns = [memory[at : at + SIZE] for at in range(0, len(memory), SIZE)]
        for slot, column in enumerate(columns):
            last = shard.evict(slot, KEY, TAG, 64, column)
        shard.wait_applied(last, 60)
        numbers = {slot: last - len(columns) + 1 + slot for slot in range(len(columns))}
        for line in sys.stdin:
            what, seconds = line.split()
            began, done = time.perf_counter(), 0
            while (now := time.perf_counter()) - began < float(seconds):
                slot = done % len(columns)
                if what == "evict":
                    numbers[slot] = last = shard.evict(slot, KEY, TAG, 64, columns[slot])
                else:
                    wanted = [Wanted(slot, Column(KEY, TAG, numbers[slot]))]
                    shard.refill(wanted, [columns[slot]])
                done += 1
            if what == "evict":
                shard.wait_applied(last, 60)
                now = time.perf_counter()
            print(done * SIZE / (now - began), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
