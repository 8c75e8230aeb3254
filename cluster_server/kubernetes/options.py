"""How the backend `kubernetes` is set up. It imports nothing of Kubernetes: settings do without that."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self


@dataclass(frozen=True, slots=True)
class LeaseTimes:
    """As Kubernetes' own controllers have them: a holder that cannot renew for `give_up_seconds` stops,
    before others may begin after `lease_seconds`."""

    lease_seconds: float = 15.0
    give_up_seconds: float = 10.0
    renew_seconds: float = 2.0

    @property
    def unsent_seconds(self) -> float:
        """How long a request may wait for the network: what a holder has sent before it gives up reaches
        the API server before another one may begin, or never."""
        return self.lease_seconds - self.give_up_seconds

    @classmethod
    def of(cls, lease_seconds: float) -> Self:
        """In the proportions that they have by default."""
        return cls(lease_seconds, lease_seconds * 2 / 3, lease_seconds * 2 / 15)


@dataclass(frozen=True)
class KubernetesOptions:
    """`kubeconfig`: None within a pod of the cluster."""

    namespace: str
    kubeconfig: Path | None = None
    image: str = "tidegate"
    command: Sequence[str] = ("python", "-m", "workload_manager")
    runner: Sequence[str] = ("python", "-m", "cluster_server.pod")
    template: Mapping[str, Any] = field(default_factory=dict)
    owns_folder: bool = True
    identity: str = field(default_factory=lambda: f"{socket.gethostname()}_{secrets.token_hex(4)}")
    lease: LeaseTimes = field(default_factory=LeaseTimes)
    jobs_at_once: int = 4
    jobs_kept: int = 200
    silent_seconds: float = 60.0
