"""The actions behind suggested fixes, by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from console.alerts.suggested_fixes.definition import Action
from console.alerts.suggested_fixes.nodes import Cordon, Drain
from console.alerts.suggested_fixes.quota import RaiseQuota
from console.alerts.suggested_fixes.streams import MoveStream, RestoreRails

ACTIONS: Final[Mapping[str, Action]] = {
    "move": MoveStream(),
    "restore-rails": RestoreRails(),
    "cordon": Cordon(),
    "drain": Drain(),
    "quota": RaiseQuota(),
}
