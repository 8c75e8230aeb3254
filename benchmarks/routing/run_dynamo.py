"""Dynamo's SelectionService, asked over pipes. `benchmarks.routing` starts it in its environment.

A column is a block of eight tokens, made from its key: all sizes are divided by eight. Events of what
workers store go over ZMQ, in vLLM's form, as its workers send them.
"""

from __future__ import annotations

import asyncio
import struct
import sys
import time
from typing import Any

import msgspec
import zmq
from dynamo._core import SelectionService

BLOCK_TOKENS = 8
KEY_BYTES = 16
EVENTS_SECONDS = 0.002  # until events that were sent are applied
_LENGTH = struct.Struct("<I")


def tokens_of(keys: bytes) -> tuple[int, ...]:
    return struct.unpack(f"<{len(keys) // 2}H", keys)


def hash_of(key: bytes) -> int:
    return int.from_bytes(key[:8], "little") >> 1  # those of its own are below 2^63


class Dynamo:
    def __init__(self) -> None:
        self._service = SelectionService(indexer_threads=1)
        self._context = zmq.Context()
        self._workers: list[Any] = []
        self._sequences: list[int] = []
        self._has_news = False

    async def begin(self, workers: int, blocks: int, step_tokens: int) -> None:
        for number in range(workers):
            socket = self._context.socket(zmq.PUB)
            port = socket.bind_to_random_port("tcp://127.0.0.1")
            self._workers.append(socket)
            self._sequences.append(0)
            await self._service.upsert_worker(
                {
                    "worker_id": number,
                    "model_name": "emulated",
                    "endpoint": f"http://127.0.0.1:{port}",
                    "block_size": BLOCK_TOKENS,
                    "kv_events_endpoint": f"tcp://127.0.0.1:{port}",
                    "max_num_batched_tokens": step_tokens * BLOCK_TOKENS // 64,
                    "total_kv_blocks": blocks,
                }
            )
        await asyncio.sleep(1)  # subscriptions of ZMQ are not confirmed

    def stored(self, worker: int, parent: bytes, keys: bytes) -> None:
        hashes = [hash_of(keys[at : at + KEY_BYTES]) for at in range(0, len(keys), KEY_BYTES)]
        before = hash_of(parent) if parent else None
        self._send(worker, ["BlockStored", hashes, before, tokens_of(keys), BLOCK_TOKENS, None])

    def removed(self, worker: int, keys: bytes) -> None:
        hashes = [hash_of(keys[at : at + KEY_BYTES]) for at in range(0, len(keys), KEY_BYTES)]
        self._send(worker, ["BlockRemoved", hashes])

    def _send(self, worker: int, event: list[object]) -> None:
        batch = msgspec.msgpack.encode([time.time(), [event], 0])
        sequence = self._sequences[worker].to_bytes(8, "big")
        self._workers[worker].send_multipart([b"", sequence, batch])
        self._sequences[worker] += 1
        self._has_news = True

    async def place(self, request: str, keys: bytes, tail: list[int]) -> int:
        if self._has_news:
            await asyncio.sleep(EVENTS_SECONDS)
            self._has_news = False
        asked = {
            "model_name": "emulated",
            "token_ids": [*tokens_of(keys), *tail],
            "selection_id": request,
        }
        found = await self._service.select_and_reserve(asked)
        return int(found["worker_id"])

    async def first_token(self, request: str) -> None:
        await self._service.prefill_complete(request)

    async def end(self, request: str) -> None:
        await self._service.free_reservation(request)


async def main() -> None:
    reader = asyncio.StreamReader(limit=1 << 26)
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    answers = sys.stdout.buffer
    dynamo = Dynamo()
    while True:
        try:
            [length] = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
        except asyncio.IncompleteReadError:
            return
        verb, *arguments = msgspec.msgpack.decode(await reader.readexactly(length))
        answer = getattr(dynamo, verb)(*arguments)
        if asyncio.iscoroutine(answer):
            found = await answer
            if verb in ("begin", "place"):
                answers.write(_LENGTH.pack(found or 0))
                answers.flush()


asyncio.run(main())
