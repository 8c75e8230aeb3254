"""The way out: connections to replicas, their health, and requests on the way to them."""

from inference_brain.upstream.client import Answer, Client, Timeouts
from inference_brain.upstream.failures import Lost, Unreachable, UpstreamFailed
from inference_brain.upstream.fleet import Fleet, Replica
from inference_brain.upstream.health import Health, State

__all__ = [
    "Answer",
    "Client",
    "Fleet",
    "Health",
    "Lost",
    "Replica",
    "State",
    "Timeouts",
    "Unreachable",
    "UpstreamFailed",
]
