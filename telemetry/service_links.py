"""Environment variables that Kubernetes sets for the Services of a namespace.

A Service called `tidegate` gives every pod `TIDEGATE_SERVICE_HOST`, `TIDEGATE_PORT=tcp://…` and more.
They look like misspelt settings, so the sentence that refuses them says where they come from. Pure.
"""

from __future__ import annotations

import re
from typing import Final

HINT: Final = (
    "Kubernetes sets it for a Service of this name: set `enableServiceLinks: false` in the pod's spec."
)
_NAME: Final = re.compile(
    r"_(SERVICE_HOST|SERVICE_PORT(_[A-Z0-9_]+)?|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)$"
)
_VALUE: Final = re.compile(r"(tcp|udp|sctp)://")


def is_service_link(name: str, value: str) -> bool:
    """Whether Kubernetes has set this variable, and not a person."""
    return bool(_NAME.search(name) or (name.endswith("_PORT") and _VALUE.match(value)))
