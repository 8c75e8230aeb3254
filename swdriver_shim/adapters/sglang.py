"""SGLang's HiCache: a driver stores pages that leave SGLang's host memory.

    --hicache-storage-backend dynamic --hicache-storage-backend-extra-config '{
        "backend_name": "kvss", "interface_v1": 1,
        "module_path": "swdriver_shim.adapters.sglang", "class_name": "KvssStorage",
        "url": "http://127.0.0.1:8420", "token_file": "/etc/tidegate/acme.token"}'

The org is the token's, or `org` for a driver in this process (`objects_config`). Each rank stores its
part under names of its own; MLA's pages are the same on all ranks and are stored once. With
`interface_v1`, and pages that lie in one piece (`page_first`, `page_first_direct`, `page_head`), bytes
go from the host pool to a slot and back without a copy between. Made for SGLang 0.5.23.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import logging
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
    PoolTransferResult,
)
from sglang.srt.mem_cache.pool_host import HostKVCache
from sglang.srt.observability.metrics_collector import StorageMetrics
from sglang.srt.runtime_context import get_server_args

from swdriver_shim.adapters.objects_config import Misconfigured, of_weights, open_objects
from swdriver_shim.adapters.weights import DIGITS
from swdriver_shim.object_store import too_large
from swdriver_shim.objects import count_leading

log = logging.getLogger(__name__)

FORMAT: Final = "sglang.2"  # of names, and of what is under them
IN_ONE_PIECE: Final = ("page_first", "page_first_direct", "page_head")
MEASURED_MAX: Final = 1024  # batches, between two times that the numbers are fetched


class Pages:
    """The pages of one host pool: their names, and the memory of their bytes."""

    def __init__(self, pool: HostKVCache, suffix: str, *, in_place: bool) -> None:
        self.pool = pool
        self._in_place = in_place and pool.layout in IN_ONE_PIECE
        if self._in_place:
            first = torch.arange(pool.page_size)
            sizes = pool.get_page_buffer_meta(first)[1]
        else:
            sizes = [_bytes(pool.get_dummy_flat_data_page()).nbytes]
        self.sizes: list[int] = list(map(int, sizes))  # of the pieces of a page: key, value, …
        form = (pool.layout, pool.dtype, pool.storage_format_tag, *self.sizes, FORMAT)
        self._suffix = "|".join(map(str, (suffix, *form)))

    def names(self, keys: Sequence[str]) -> list[bytes]:
        """The names of all pieces, page by page. Bytes of another shape or order have other names."""
        return [
            f"{key}|{self._suffix}|{piece}".encode() for key in keys for piece in range(len(self.sizes))
        ]

    def whole(self, pieces: Sequence[bool]) -> list[bool]:
        """Which pages have all their pieces."""
        count = len(self.sizes)
        return [all(pieces[at : at + count]) for at in range(0, len(pieces), count)]

    def read(self, indices: torch.Tensor) -> list[memoryview]:
        """The bytes of these pages."""
        if self._in_place:
            return self._places(indices)
        starts = indices[:: self.pool.page_size].tolist()
        return [_bytes(self.pool.get_data_page(start, flat=True)) for start in starts]

    def rooms(self, indices: torch.Tensor) -> list[memoryview]:
        """Memory to read pages into: in place, or buffers that `filled` copies from."""
        if self._in_place:
            return self._places(indices)
        count = len(indices) // self.pool.page_size
        return [_bytes(self.pool.get_dummy_flat_data_page()) for _ in range(count)]

    def filled(
        self, indices: torch.Tensor, rooms: Sequence[memoryview], is_there: Sequence[bool]
    ) -> None:
        if self._in_place:
            return
        starts = indices[:: self.pool.page_size].tolist()
        for start, room, is_whole in zip(starts, rooms, is_there, strict=True):
            if is_whole:
                page = torch.frombuffer(room, dtype=torch.uint8).view(self.pool.dtype)
                self.pool.set_from_flat_data_page(start, page)

    def _places(self, indices: torch.Tensor) -> list[memoryview]:
        pointers, sizes = self.pool.get_page_buffer_meta(indices)
        return [
            memoryview((ctypes.c_char * size).from_address(pointer)).cast("B")
            for pointer, size in zip(pointers, sizes, strict=True)
        ]


class KvssStorage(HiCacheStorage):
    def __init__(self, storage_config: HiCacheStorageConfig, _kwargs: object = None) -> None:
        """Raises Misconfigured."""
        told = storage_config.extra_config or {}
        self._opened = open_objects(told, rank_of(storage_config))
        self._objects = self._opened.objects
        self._wait_seconds = self._opened.wait_seconds
        self._in_place = bool(told.get("interface_v1", 0))
        self._config = storage_config
        self._served = _served(told)
        self._pages: dict[str, Pages] = {}
        self._measures = storage_config.enable_storage_metrics
        self._metrics = StorageMetrics()

    def close(self) -> None:
        self._opened.close()

    # Pools

    def register_mem_pool_host(self, mem_pool_host: HostKVCache) -> None:
        super().register_mem_pool_host(mem_pool_host)
        self._register(PoolName.KV, mem_pool_host, in_place=self._in_place)

    def register_mem_host_pool_v2(self, host_pool: HostKVCache, host_pool_name: str) -> None:
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        if host_pool_name != PoolName.KV or PoolName.KV not in self._pages:
            self._register(host_pool_name, host_pool, in_place=False)

    def _register(self, name: str, pool: HostKVCache, *, in_place: bool) -> None:
        pages = Pages(pool, self._suffix(name), in_place=in_place)
        size, most = max(pages.sizes), self._objects.value_bytes_max
        if size > most:
            what = f"A piece of a page of SGLang's pool {name}"
            raise Misconfigured(too_large(what, size, most))
        self._pages[str(name)] = pages

    def _suffix(self, name: str) -> str:
        """Names the model, and the rank whose part of a page it is. MLA's is the same on all tensor
        ranks, Mamba's not."""
        of = self._config
        parts = [str(name), of.model_name or "", self._served]
        if not of.is_mla_model or name == PoolName.MAMBA:
            parts.append(f"tp{of.tp_rank}.{of.tp_size}")
        parts.append(f"pp{of.pp_rank}.{of.pp_size}")
        parts.append(f"cp{of.attn_cp_rank}.{of.attn_cp_size}")
        parts.append(f"dcp{of.dcp_rank}.{of.dcp_size}")
        return "|".join(parts)

    # Pages in the host pool

    def batch_exists(self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None) -> int:
        return count_leading(self._there(PoolName.KV, keys))

    def batch_get_v1(
        self,
        keys: list[str],
        host_indices: torch.Tensor,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> list[bool]:
        return self._get(PoolName.KV, keys, host_indices)

    def batch_set_v1(
        self,
        keys: list[str],
        host_indices: torch.Tensor,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> list[bool]:
        return self._set(PoolName.KV, keys, host_indices)

    def batch_get_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        return {one.name: self._get(one.name, one.keys or [], one.host_indices) for one in transfers}

    def batch_set_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        return {one.name: self._set(one.name, one.keys or [], one.host_indices) for one in transfers}

    def batch_exists_v2(
        self,
        keys: list[str],
        pool_transfers: list[PoolTransfer] | None = None,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> PoolTransferResult:
        """How many pages of the prefix can be restored: those that are stored in a row, as far as every
        other pool has what it needs for them."""
        kv = count_leading(self._there(PoolName.KV, keys))
        hits = {str(PoolName.KV): kv} if kv else {}
        restorable = set(range(1, kv + 1))
        for transfer in pool_transfers or []:
            there = self._there(transfer.name, keys[:kv])
            if transfer.hit_policy == PoolHitPolicy.ALL_PAGES:
                needed = kv
            elif transfer.hit_policy == PoolHitPolicy.TRAILING_PAGES:
                needed = max(1, len(transfer.keys or ()))
            else:
                continue  # blocks of pages: not stored here, and they never limit the others
            mine = {pages for pages in range(1, kv + 1) if all(there[max(0, pages - needed) : pages])}
            if mine:
                hits[str(transfer.name)] = max(mine)
            restorable &= mine
        return PoolTransferResult(max(restorable, default=0), hits, sorted(restorable))

    def _there(self, name: str, keys: Sequence[str]) -> list[bool]:
        pages = self._pages[str(name)]
        return pages.whole(self._objects.exists(pages.names(keys), self._wait_seconds))

    def _get(self, name: str, keys: Sequence[str], indices: torch.Tensor | None) -> list[bool]:
        pages = self._fitting(name, keys, indices)
        if pages is None or indices is None:
            return [False] * len(keys)
        began, rooms = time.perf_counter(), pages.rooms(indices)
        lengths = self._objects.get(pages.names(keys), rooms, self._wait_seconds)
        there = pages.whole([length == len(room) for length, room in zip(lengths, rooms, strict=True)])
        pages.filled(indices, rooms, there)
        self._measure(pages, sum(there), began, is_prefetch=True)
        return there

    def _set(self, name: str, keys: Sequence[str], indices: torch.Tensor | None) -> list[bool]:
        pages = self._fitting(name, keys, indices)
        if pages is None or indices is None:
            return [False] * len(keys)
        began = time.perf_counter()
        kept = pages.whole(self._objects.put(pages.names(keys), pages.read(indices)))
        self._measure(pages, sum(kept), began, is_prefetch=False)
        return kept

    def _fitting(self, name: str, keys: Sequence[str], indices: torch.Tensor | None) -> Pages | None:
        pages = self._pages[str(name)]
        count = 0 if indices is None else len(indices)
        if count == len(keys) * pages.pool.page_size:
            return pages
        log.error("%s pages of pool %s were requested, with %s indices", len(keys), name, count)
        return None

    # Whole pages in tensors, as the interface has it from before there was `interface_v1`

    def get(
        self,
        key: str,
        target_location: torch.Tensor | None = None,
        target_sizes: object = None,
    ) -> torch.Tensor | None:
        return self.batch_get([key], None if target_location is None else [target_location])[0]

    def batch_get(
        self,
        keys: list[str],
        target_locations: list[torch.Tensor] | None = None,
        target_sizes: object = None,
    ) -> list[torch.Tensor | None]:
        pages = self._pages[PoolName.KV]
        targets = target_locations or [pages.pool.get_dummy_flat_data_page() for _ in keys]
        rooms = [piece for target in targets for piece in self._cut(pages, target)]
        lengths = self._objects.get(pages.names(keys), rooms, self._wait_seconds)
        there = pages.whole([length == len(room) for length, room in zip(lengths, rooms, strict=True)])
        return [target if is_there else None for target, is_there in zip(targets, there, strict=True)]

    def set(
        self,
        key: str,
        value: torch.Tensor | None = None,
        target_location: object = None,
        target_sizes: object = None,
    ) -> bool:
        return value is not None and self.batch_set([key], [value])

    def batch_set(
        self,
        keys: list[str],
        values: list[torch.Tensor] | None = None,
        target_locations: object = None,
        target_sizes: object = None,
    ) -> bool:
        pages = self._pages[PoolName.KV]
        pieces = [piece for value in values or [] for piece in self._cut(pages, value.contiguous())]
        return len(values or []) == len(keys) and all(self._objects.put(pages.names(keys), pieces))

    @staticmethod
    def _cut(pages: Pages, page: torch.Tensor) -> list[memoryview]:
        data, pieces = _bytes(page), []
        for size in pages.sizes:
            pieces.append(data[:size])
            data = data[size:]
        return pieces

    def exists(self, key: str) -> bool:
        return self.batch_exists([key]) == 1

    # The rest

    def clear(self) -> bool:
        """Purge all of the org in this namespace, on every rank and in every tier."""
        return self._objects.clear()

    def _measure(self, pages: Pages, count: int, began: float, *, is_prefetch: bool) -> None:
        told = self._metrics
        kinds = (told.prefetch_pgs, told.prefetch_bandwidth, told.backup_pgs, told.backup_bandwidth)
        counts, speeds = kinds[:2] if is_prefetch else kinds[2:]
        if self._measures and count and len(counts) < MEASURED_MAX:
            counts.append(count)
            speeds.append(count * sum(pages.sizes) / (time.perf_counter() - began) / 1e9)

    def get_stats(self) -> StorageMetrics:
        """The measurements since the last call."""
        told, self._metrics = self._metrics, StorageMetrics()
        return told


def rank_of(of: HiCacheStorageConfig) -> int:
    """The rank of this process among all processes of a server, over all kinds of parallelism."""
    rank = of.dp_rank * of.attn_cp_size + of.attn_cp_rank
    return int((rank * of.pp_size + of.pp_rank) * of.tp_size + of.tp_rank)


def _served(told: Mapping[str, Any]) -> str:
    """A digest of what decides a page's bytes for given tokens. The name that a model is served by does
    not say which it is, and a pool calls all 8-bit dtypes bytes. Raises Misconfigured."""
    server = get_server_args()
    model, revision = server.model_path, server.revision
    commit = _commit(model, revision, server.download_dir)
    why = f"it is not known which commit of {model} SGLang has loaded"
    facts = (
        *of_weights(model, told, why, commit=commit),
        None if commit else revision,
        *(server.dtype, server.quantization, server.kv_cache_dtype, server.json_model_override_args),
    )
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:DIGITS]


def _commit(repository: str, revision: str | None, download_dir: str | None) -> str | None:
    """Of what SGLang has loaded from the Hugging Face hub: it looks into these folders in this order.
    None if that is somewhere else."""
    for folder in dict.fromkeys((download_dir, None)):
        # No network, and of the files none in particular: weights may be there without anything else.
        with contextlib.suppress(LocalEntryNotFoundError, HFValidationError):  # the latter of a path
            snapshot = snapshot_download(
                repository,
                revision=revision,
                cache_dir=folder,
                allow_patterns=[],
                local_files_only=True,
            )
            return Path(snapshot).name
    return None


def _bytes(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.view(-1).view(torch.uint8).numpy())
