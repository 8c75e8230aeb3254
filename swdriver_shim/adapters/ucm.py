"""UCM's store: a driver's daemon stores the blocks of Unified Cache Management.

    ucm_connectors:
      - ucm_connector_name: KvssStore
        ucm_connector_module_path: swdriver_shim.adapters.ucm
        ucm_connector_config: {url: "http://127.0.0.1:8420", token_file: /etc/tidegate/acme.token,
                               variant: "llama-3 r2 fp8_e4m3"}

UCM's names of blocks have the model's last name and dtype: not which weights these are, nor which of the
8-bit types. `variant` says that, and stores with different ones share nothing.

The scheduler's store and the workers' are in different processes and need the same data, so the driver
is always a daemon. Blocks are copied from and to host memory: on a machine with an accelerator, whose
addresses are not valid on the host, the store refuses to start. Made for UCM 0.8.1, and its interface at
cdd4406.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import repeat
from typing import Any, Final

import torch
from ucm.store.ucmstore_v1 import Task, UcmKVStoreBaseV1

from swdriver_shim.adapters.objects_config import Misconfigured, open_objects, variant_of
from swdriver_shim.adapters.threads import start_pool
from swdriver_shim.adapters.weights import DIGITS
from swdriver_shim.objects import count_leading

FORMAT: Final = "ucm.2"  # of names, and of what is under them
THREADS: Final = 4

Places = list[list[memoryview]]  # of each block and shard: pieces, one after the other in its value


class Failed(RuntimeError):
    """What UCM catches, to compute those blocks anew."""


@dataclass(frozen=True, slots=True)
class Transfer(Task):
    done: Future[None]


class KvssStore(UcmKVStoreBaseV1):
    def __init__(self, config: dict[str, Any]) -> None:
        """Raises Misconfigured."""
        super().__init__(config)
        if config.get("state_dir"):
            raise Misconfigured("UCM uses several processes: configure the url of a daemon.")
        if config.get("device_id", -1) >= 0 and torch.accelerator.is_available():
            raise Misconfigured("This store copies blocks in host memory, not in an accelerator's.")
        variant = variant_of(config, "UCM names blocks by neither the weights nor the type of KV")
        self._form = f"{FORMAT}|{hashlib.sha256(variant.encode()).hexdigest()[:DIGITS]}".encode()
        self._sizes: list[int] = list(config.get("tensor_size_list", []))
        self._opened = open_objects(config, value_bytes=sum(self._sizes))
        self._objects = self._opened.objects
        self._wait_seconds = self._opened.wait_seconds
        self._threads = start_pool(THREADS, "kvss")

    def cc_store(self) -> int:
        raise NotImplementedError("there is no native store behind it")

    # Looking. A block is there if its first shard is: shards are stored in order, and leave in order.

    def lookup(self, block_ids: list[bytes]) -> list[bool]:
        return self._objects.exists(self._names(block_ids, repeat(0)), self._wait_seconds)

    def lookup_on_prefix(self, block_ids: list[bytes]) -> int:
        return count_leading(self.lookup(block_ids)) - 1

    def lookup_on_reverse(self, block_ids: list[bytes]) -> int:
        return max((place for place, found in enumerate(self.lookup(block_ids)) if found), default=-1)

    def prefetch(self, block_ids: list[bytes]) -> None:
        self._threads.submit(self._objects.exists, self._names(block_ids, repeat(0)))

    # Moving

    def load(
        self, block_ids: list[bytes], shard_index: list[int], dst_tensor: list[list[torch.Tensor]]
    ) -> Task:
        return self._begin(self._load, block_ids, shard_index, _in_tensors(dst_tensor))

    def dump(
        self, block_ids: list[bytes], shard_index: list[int], src_tensor: list[list[torch.Tensor]]
    ) -> Task:
        return self._begin(self._dump, block_ids, shard_index, _in_tensors(src_tensor))

    def load_data(
        self, block_ids: list[bytes], shard_index: list[int], dst_addr: Sequence[Sequence[int]]
    ) -> Task:
        return self._begin(self._load, block_ids, shard_index, self._at(dst_addr))

    fetch_data = load_data  # as it was called before

    def dump_data(
        self,
        block_ids: list[bytes],
        shard_index: list[int],
        src_addr: Sequence[Sequence[int]],
        prerequisite_handle: int = 0,
    ) -> Task:
        return self._begin(self._dump, block_ids, shard_index, self._at(src_addr))

    def wait(self, task: Transfer) -> None:
        """Raises Failed if some block could not be had, or not be kept."""
        task.done.result()

    def check(self, task: Transfer) -> bool:
        return task.done.done()

    def close(self) -> None:
        self._threads.shutdown()
        self._opened.close()

    def _begin(
        self,
        work: Callable[[list[bytes], Places], None],
        blocks: Sequence[bytes],
        shards: Sequence[int],
        places: Places,
    ) -> Transfer:
        return Transfer(self._threads.submit(work, self._names(blocks, shards), places))

    def _load(self, names: list[bytes], places: Places) -> None:
        rooms = [memoryview(bytearray(sum(map(len, pieces)))) for pieces in places]
        lengths = self._objects.get(names, rooms, self._wait_seconds)
        missed = 0
        for room, pieces, length in zip(rooms, places, lengths, strict=True):
            if length != len(room):
                missed += 1
                continue
            for piece in pieces:
                piece[:], room = room[: len(piece)], room[len(piece) :]
        if missed:
            raise Failed(f"{missed} of {len(names)} blocks are not stored")

    def _dump(self, names: list[bytes], places: Places) -> None:
        try:
            kept = self._objects.put(names, [memoryview(b"".join(pieces)) for pieces in places])
        except ValueError as error:  # too large: nobody could tell at the start, as without the sizes
            raise Failed(str(error)) from error
        if not all(kept):
            raise Failed(f"{kept.count(False)} of {len(names)} blocks could not be stored")

    def _at(self, addresses: Sequence[Sequence[int]]) -> Places:
        """Those of no size have no address: UCM fills rows up with them."""
        return [
            [
                memoryview((ctypes.c_char * size).from_address(int(address))).cast("B")
                for address, size in zip(row, self._sizes, strict=True)
                if size
            ]
            for row in addresses
        ]

    def _names(self, blocks: Sequence[bytes], shards: Iterable[int]) -> list[bytes]:
        return [
            b"%s|%d|%s" % (block, shard, self._form)
            for block, shard in zip(blocks, shards, strict=False)
        ]


def _in_tensors(tensors: Sequence[Sequence[torch.Tensor]]) -> Places:
    return [[memoryview(one.view(-1).view(torch.uint8).numpy()) for one in pieces] for pieces in tensors]
