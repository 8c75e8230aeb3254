"""LMCache's remote storage: a connector that asks a driver directly.

    remote_storage_plugins: ["kvss"]
    extra_config:
      remote_storage_plugin.kvss.module_path: swdriver_shim.adapters.lmcache
      remote_storage_plugin.kvss.class_name: KvssConnector
      remote_storage_plugin.kvss.url: http://127.0.0.1:8420
      remote_storage_plugin.kvss.token_file: /etc/tidegate/acme.token
      remote_storage_plugin.kvss.variant: r1

Engines that should not be touched at all use `lm://` instead (`lmcache_server`). Many chunks go in one
call. With `save_chunk_meta: false` they go without a copy between; otherwise shape and dtype go with
each. `variant` says what LMCache's keys do not: engines with different ones share nothing. Made for
LMCache 0.5.6.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

import torch
from lmcache.utils import CacheEngineKey
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.memory_management import MemoryObj
from lmcache.v1.metadata import LMCacheMetadata
from lmcache.v1.protocol import RemoteMetadata
from lmcache.v1.storage_backend.connector.base_connector import RemoteConnector
from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend

from swdriver_shim.adapters.objects_config import of_weights, open_objects
from swdriver_shim.adapters.threads import start_pool
from swdriver_shim.adapters.weights import DIGITS
from swdriver_shim.objects import count_leading

log = logging.getLogger(__name__)

PREFIX: Final = "remote_storage_plugin.kvss."
FORMAT: Final = "lmcache.2"  # of what is under a name
THREADS: Final = 4
COPIED_BYTES: Final = 256 << 20  # of chunks that go with their shape, at once

T = TypeVar("T")
Found = list[MemoryObj | None]


class KvssConnector(RemoteConnector):
    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        local_cpu_backend: LocalCPUBackend,
        config: LMCacheEngineConfig,
    ) -> None:
        """Raises Misconfigured."""
        super().__init__(local_cpu_backend.config, local_cpu_backend.metadata)
        told = {
            name.removeprefix(PREFIX): value
            for name, value in (config.extra_config or {}).items()
            if name.startswith(PREFIX)
        }
        self._form = _form(told, local_cpu_backend.metadata)
        self._head_bytes = self.remote_metadata_bytes if self.save_chunk_meta else 0
        rank = local_cpu_backend.metadata.worker_id
        self._opened = open_objects(told, rank, self._head_bytes + self.full_chunk_size_bytes)
        self._objects = self._opened.objects
        self._wait_seconds = self._opened.wait_seconds
        self._backend = local_cpu_backend
        self._loop = loop
        self._threads = start_pool(THREADS, "kvss")

    # Looking

    def exists_sync(self, key: CacheEngineKey) -> bool:
        return all(self._objects.exists(self._names([key]), self._wait_seconds))

    async def exists(self, key: CacheEngineKey) -> bool:
        return await self._in_thread(self.exists_sync, key)

    def support_batched_contains(self) -> bool:
        return True

    def batched_contains(self, keys: list[CacheEngineKey]) -> int:
        return count_leading(self._objects.exists(self._names(keys), self._wait_seconds))

    async def batched_async_contains(
        self,
        lookup_id: str,
        keys: list[CacheEngineKey],
        pin: bool = False,  # noqa: FBT001
    ) -> int:
        """Nothing is pinned: a chunk may be gone when it is got, and is a miss then."""
        return await self._in_thread(self.batched_contains, keys)

    # Getting

    def support_batched_get(self) -> bool:
        return True

    async def get(self, key: CacheEngineKey) -> MemoryObj | None:
        return (await self.batched_get([key]))[0]

    async def batched_get(self, keys: list[CacheEngineKey]) -> Found:
        running = self._loop.run_in_executor(self._threads, self._get, keys)
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:  # LMCache has stopped waiting: nobody else would let go of them
            running.add_done_callback(lambda done: _let_go(done.result()))
            raise

    async def batched_get_non_blocking(
        self, lookup_id: str, keys: list[CacheEngineKey]
    ) -> list[MemoryObj]:
        found = await self.batched_get(keys)
        count = count_leading([one is not None for one in found])
        _let_go(found[count:])
        return [one for one in found[:count] if one is not None]

    def _get(self, keys: Sequence[CacheEngineKey]) -> Found:
        """Releases all chunks if something fails."""
        found: Found = []
        try:
            if self._head_bytes:
                for some in self._at_once(keys):
                    self._get_with_heads(some, found)
            else:
                self._get_in_place(keys, found)
        except BaseException:
            _let_go(found)
            raise
        return found

    def _at_once(self, keys: Sequence[CacheEngineKey]) -> list[Sequence[CacheEngineKey]]:
        """Split keys so that copies of one part fit in memory."""
        most = max(1, COPIED_BYTES // (self._head_bytes + self.full_chunk_size_bytes))
        return [keys[at : at + most] for at in range(0, len(keys), most)]

    def _get_with_heads(self, keys: Sequence[CacheEngineKey], found: Found) -> None:
        """Allocates a chunk once its shape is known."""
        size = self._head_bytes + self.full_chunk_size_bytes
        rooms = [memoryview(bytearray(size)) for _ in keys]
        lengths = self._objects.get(self._names(keys), rooms, self._wait_seconds)
        for room, length in zip(rooms, lengths, strict=True):
            if length is None or length <= self._head_bytes:
                found.append(None)
                continue
            head = RemoteMetadata.deserialize(room[: self._head_bytes])
            chunk = self._backend.allocate(head.shapes, head.dtypes, head.fmt, busy_loop=False)
            data = room[self._head_bytes : length]
            if chunk is not None and len(chunk.byte_array) == len(data):
                _bytes(chunk)[:] = data
                found.append(chunk)
            else:
                _let_go([chunk])
                found.append(None)

    def _get_in_place(self, keys: Sequence[CacheEngineKey], found: Found) -> None:
        found += [
            self._backend.allocate(self.meta_shapes, self.meta_dtypes, self.meta_fmt, busy_loop=False)
            for _ in keys
        ]
        room = count_leading([chunk is not None for chunk in found])
        _let_go(found[room:])
        found[room:] = []
        rooms = [_bytes(chunk) for chunk in found if chunk is not None]
        lengths = self._objects.get(self._names(keys[:room]), rooms, self._wait_seconds)
        for place, (chunk, length) in enumerate(zip(found, lengths, strict=True)):
            if length is None or length % self.single_token_size:
                _let_go([chunk])
                found[place] = None
            else:
                found[place] = self.reshape_partial_chunk(chunk, length)
        found += [None] * (len(keys) - room)

    # Putting

    def support_batched_put(self) -> bool:
        return True

    async def put(self, key: CacheEngineKey, memory_obj: MemoryObj) -> None:
        await self.batched_put([key], [memory_obj])

    async def batched_put(self, keys: list[CacheEngineKey], memory_objs: list[MemoryObj]) -> None:
        await self._in_thread(self._put, keys, memory_objs)

    def _put(self, keys: Sequence[CacheEngineKey], chunks: Sequence[MemoryObj]) -> None:
        if not self._head_bytes:
            self._objects.put(self._names(keys), list(map(_bytes, chunks)))
            return
        left = iter(chunks)
        for some in self._at_once(keys):
            self._objects.put(self._names(some), [self._with_head(next(left)) for _ in some])

    @staticmethod
    def _with_head(chunk: MemoryObj) -> memoryview:
        data = _bytes(chunk)
        head = RemoteMetadata(
            len(data), chunk.get_shapes(), chunk.get_dtypes(), chunk.get_memory_format()
        )
        return memoryview(head.serialize() + data)

    # The rest

    def remove_sync(self, key: CacheEngineKey) -> bool:
        return self._objects.remove(self._names([key]))

    async def close(self) -> None:
        await self._in_thread(self._opened.close)
        self._threads.shutdown(wait=False)

    def _names(self, keys: Sequence[CacheEngineKey]) -> list[bytes]:
        """Chunks of another format have other names."""
        return [f"{key.to_string()}|{self._form}|{self._head_bytes}".encode() for key in keys]

    async def _in_thread(self, work: Callable[..., T], *arguments: Any) -> T:
        return await self._loop.run_in_executor(self._threads, work, *arguments)

    async def list(self) -> list[str]:  # the last: it hides the type
        """Keys are stored only as hashes with the org's secret, so they can't be listed."""
        return []


def _form(told: dict[str, Any], of: LMCacheMetadata) -> str:
    """What LMCache's keys do not say, and other bytes come of. Raises Misconfigured."""
    why = f"LMCache tells neither the revision of {of.model_name} nor which 8-bit type its KV has"
    said = of_weights(of.model_name, told, why, is_known=of.kv_dtype is not torch.uint8)
    return f"{FORMAT}|{hashlib.sha256(repr(said).encode()).hexdigest()[:DIGITS]}"


def _bytes(chunk: MemoryObj) -> memoryview:
    return memoryview(chunk.byte_array).cast("B")


def _let_go(chunks: Sequence[MemoryObj | None]) -> None:
    for chunk in chunks:
        if chunk is not None:
            chunk.ref_count_down()
