"""Tokenizers that were uploaded, by the hash of what is in them, and families that are there beforehand.

    store = TokenizerStore(folder)
    sha256 = store.add(archive)          # checked in a process of its own
    store.folder(sha256)                 # as brains and engines read it

Nobody imports this to read a tokenizer: what comes back is a folder as any model has it.
"""

from __future__ import annotations

from workload_manager.tokenizers.archive import BadArchive
from workload_manager.tokenizers.families import families, family
from workload_manager.tokenizers.store import NotStored, TokenizerStore

__all__ = [
    "BadArchive",
    "NotStored",
    "TokenizerStore",
    "families",
    "family",
]
