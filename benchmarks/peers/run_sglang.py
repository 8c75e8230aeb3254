"""SGLang's radix cache, which finds prefixes by comparing tokens; with the keys of its storage, too.

`RadixCache` is SGLang's own, without memory pools. In the measured time are: the list of tokens as an
array, which is what its requests hold (`packed` begins with that), `match_prefix` and `lock`. In the
variant `keys` there is what has to come before a look in storage that other processes share: the hash of
each page, by SGLang's own compiled code.

SGLang imports its models with the cache, and with them torchvision, of which nothing runs here.
"""

from __future__ import annotations

import os
import sys
from array import array
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from benchmarks.peers.matching import Matcher, prompt, run

PAGES = {"": 64, "page1": 1, "keys": 64}
STOOD_IN_FOR = "torchvision"


class _Anything(ModuleType):
    """A module in which every name is a class of nothing."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


class _StandIn(MetaPathFinder, Loader):
    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:  # noqa: ARG002
        meant = fullname.split(".", maxsplit=1)[0] == STOOD_IN_FOR
        return ModuleSpec(fullname, self, is_package=True) if meant else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Anything(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """It is empty."""


def bare_package(name: str) -> None:
    """Let modules of a package be imported without what the package itself imports."""
    spec = find_spec(name)
    if spec is None:
        raise ModuleNotFoundError(f"there is no {name}")
    package = ModuleType(name)
    package.__path__ = list(spec.submodule_search_locations or ())
    package.__spec__ = spec
    sys.modules[name] = package


class Sglang(Matcher):
    def start(self) -> None:
        os.environ["HF_HUB_OFFLINE"] = "1"
        for name in ("TORCH_EXTENSIONS_DIR", "SGLANG_CACHE_DIR"):  # what it compiles stays beside it
            os.environ[name] = str(Path(sys.prefix).parent / "compiled")
        import transformers  # noqa: F401 # looks for the real one

        sys.meta_path.append(_StandIn())
        bare_package("sglang")
        import torch
        from sglang.srt.mem_cache import base_prefix_cache, utils
        from sglang.srt.mem_cache.radix_cache import (
            RadixCache,
            RadixKey,
        )

        self.new_tree, self.new_key, self.slots = RadixCache.create_simulated, RadixKey, torch.arange
        self.asked, self.inserted = base_prefix_cache.MatchPrefixParams, base_prefix_cache.InsertParams
        self.page_keys = utils.get_storage_hash_str
        self.trees: dict[str, Any] = {}

    def fill(self, prompts: int, tokens: int) -> dict[str, str | None]:
        reasons: dict[str, str | None] = {}
        for variant, page in PAGES.items():
            tree = self.trees[variant] = self.new_tree(page_size=page)
            for number in range(prompts):
                key = self.new_key(array("q", prompt(number, tokens)))
                tree.insert(self.inserted(key=key, value=self.slots(tokens)))
            reasons[variant] = self._no_keys() if variant == "keys" else None
        return reasons

    def _no_keys(self) -> str | None:
        """Why pages can't be hashed. The code for that is compiled when it is first called."""
        try:
            self.page_keys(self.new_key(array("q", range(64))), None, page_size=64)
        except Exception as error:  # noqa: BLE001 # whatever it was, it is the reason
            return " ".join(str(error.__cause__ or error).split())[:200]
        return None

    def use(self, variant: str) -> None:
        self.tree, self.page = self.trees[variant], PAGES[variant]
        self.with_keys = variant == "keys"

    def cold(self, tokens: list[int]) -> int:
        return self.packed(array("q", tokens))

    def continued(self, more: list[int]) -> int:
        self.tokens.extend(array("q", more))
        return self._look_up(self.new_key(self.tokens), self.latest)

    def pack(self, tokens: list[int]) -> array[int]:
        return array("q", tokens)

    def packed(self, tokens: array[int]) -> int:
        self.tokens = tokens
        self.latest: list[str] = []
        return self._look_up(self.new_key(tokens), [])

    def _look_up(self, key: Any, known: list[str]) -> int:
        match = self.tree.match_prefix(self.asked(key=key))
        self.lock = self.tree.lock(match.last_device_node)
        if self.with_keys:
            rest = self.new_key(self.tokens[len(known) * self.page :]) if known else key
            last = known[-1] if known else None
            self.latest = known + self.page_keys(rest, last, page_size=self.page)
        return int(match.device_prefix_len)

    def release(self) -> None:
        self.tree.unlock(self.lock)


if __name__ == "__main__":
    run(Sglang)
