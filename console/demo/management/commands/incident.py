"""`manage.py incident ADDRESS`: stage an incident on the running demo, for `make incident`."""

from __future__ import annotations

from console.demo.incident import Incident
from console.demo.staging import StoryCommand


class Command(StoryCommand):
    help = "Stage an incident on the running demo, from a slow spine to a resolved alert."
    story = Incident
