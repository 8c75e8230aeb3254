"""Where an agent listens for its data plane."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

_HOST: Final = re.compile(r"[^\s\[\]]+")
_KEY: Final = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class Address:
    """Where an agent listens: `unix:/path`, `tcp:host:port`, or `tls:host:port#key` where both sides
    show certificates of a console's authority. `key` is the fingerprint of the agent's."""

    path: str = ""
    host: str = ""
    port: int = 0
    is_tls: bool = False
    key: str = ""

    @classmethod
    def parse(cls, text: str) -> Address:
        kind, _, rest = text.partition(":")
        if kind == "unix" and rest:
            return cls(path=rest)
        rest, has_key, key = rest.partition("#") if kind == "tls" else (rest, "", "")
        host, _, port = rest.rpartition(":")
        if (
            kind in ("tcp", "tls")
            and host
            and port.isdecimal()
            and 0 < int(port) < 65536
            and (not has_key or _KEY.fullmatch(key))
        ):
            bare = host.removeprefix("[").removesuffix("]")
            if _HOST.fullmatch(bare):
                return cls(host=bare, port=int(port), is_tls=kind == "tls", key=key)
        raise ValueError(
            f"an address is unix:/path, tcp:host:port or tls:host:port#key, not {text[:200]!r}"
        )

    def __str__(self) -> str:
        if self.path:
            return f"unix:{self.path}"
        host = f"[{self.host}]" if ":" in self.host else self.host
        key = f"#{self.key}" if self.key else ""
        return f"{'tls' if self.is_tls else 'tcp'}:{host}:{self.port}{key}"
