"""How an engine verifies a daemon that serves TLS: by the driver's name, and by the authorities of its
console. The daemon stores these as `authorities.pem` in its state directory."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path

from kvss_agent.security.certificates import Role, process_name


@dataclass(frozen=True, slots=True)
class ExpectedDriver:
    """The driver that has to answer. `authorities` is a file that is replaced when they change."""

    authorities: Path
    driver: str

    @property
    def server_name(self) -> str:
        """Raises ValueError for a name that makes no host name."""
        found = process_name(Role.DRIVER, self.driver)
        if found is None:
            raise ValueError(f"the driver's name {self.driver} makes no host name")
        return found

    @property
    def version(self) -> tuple[int, int]:
        """The version of the file: changes when it is replaced. Raises OSError."""
        found = self.authorities.stat()
        return found.st_ino, found.st_mtime_ns

    def context(self) -> ssl.SSLContext:
        """Raises OSError, also for a file that holds no certificates."""
        made = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        made.minimum_version = ssl.TLSVersion.TLSv1_3
        made.load_verify_locations(self.authorities)
        return made
