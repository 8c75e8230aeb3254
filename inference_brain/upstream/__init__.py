"""The way out: replicas, their health, and which requests are on the way to them."""

from inference_brain.upstream.fleet import Fleet, Replica
from inference_brain.upstream.health import Health, State

__all__ = ["Fleet", "Health", "Replica", "State"]
