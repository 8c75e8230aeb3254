"""What happens to policies without anybody asking."""

from __future__ import annotations

from django.utils import timezone

from console.periodic import periodic
from console.policies import schedule


@periodic
def run_due() -> None:
    """Scheduled policies begin and end."""
    schedule.run_due(timezone.now())
