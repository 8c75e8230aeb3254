"""The way out: replicas, their health, and which requests are on the way to them."""

from inference_brain.upstream.fleet import Fleet

__all__ = ["Fleet"]
