"""Slow transfers."""

from __future__ import annotations

from telemetry.emit.transfers import Transfer


def transfer(seconds: float = 0.1, **more: object) -> Transfer:
    fields = {
        "at": 1_790_000_000.0,
        "seconds": seconds,
        "direction": "in",
        "org": "acme",
        "request": "",
        "stream": "full.0",
        "slot_first": 1,
        "slot_last": 2,
        "columns": 2,
        "bytes": 10,
        "session": "chat",
        "node": "ax-1",
        "tier": "rail",
        "nic_leaf": "leaf-1",
        "link": "",
    }
    return Transfer(**{**fields, **more})  # type: ignore[arg-type]  # mixed on purpose
