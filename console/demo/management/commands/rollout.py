"""`manage.py rollout ADDRESS`: stage rollouts on the running demo, for `make rollout`."""

from __future__ import annotations

from console.ctl.failures import Failed
from console.demo.rollout import RolloutStory
from console.demo.staging import CannotStage, StoryCommand


class Command(StoryCommand):
    help = "Stage rollouts on the running demo: one that keeps the cache, and one that is undone."
    story = RolloutStory
    faults = (CannotStage, Failed)
