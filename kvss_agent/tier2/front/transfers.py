"""Whole files, copied from one backend to another."""

from __future__ import annotations

import mmap

from kvss_agent.tier2.address import Address
from kvss_agent.tier2.backend import Backend, Failed, Fault, Outgoing, look_at
from kvss_agent.tier2.column_file import plausible


def copy(one: Backend, other: Backend, address: Address, since: float) -> bool:
    """False: there is no such file, or it is half of one. Raises Failed.

    A file of this name and size that is there already stays: it is the same column, and it may be of
    others, while nobody has looked at the content of ours.
    """
    content = read_whole(one, address.name)
    if content is None or not plausible(len(content)):
        return False
    there = look_at(other, address.name)
    if there is not None and there.bytes == len(content):
        return True
    (stored,) = other.write([Outgoing(address.name, [content], lambda: True, since)])
    if isinstance(stored, Failed):
        raise stored
    return True


def read_whole(backend: Backend, name: str) -> memoryview | None:
    """The content of a file; empty if it has no size that a column's file has. Raises Failed."""
    seen = look_at(backend, name)
    if seen is None:
        return None
    if not plausible(seen.bytes):
        return memoryview(b"")
    try:
        content = memoryview(mmap.mmap(-1, seen.bytes))
    except (OSError, OverflowError) as error:
        raise Failed(Fault.OTHER, f"no memory for {seen.bytes} bytes: {error}") from error
    (size,) = backend.read([(name, [content])])
    if isinstance(size, Failed):
        raise size
    return None if size is None else content[:size]
