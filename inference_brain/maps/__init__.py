"""Cache maps: what each driver's cache can serve, until when, as its driver reports it."""

from __future__ import annotations

from inference_brain.maps.cache_maps import CacheMaps, DriverPlace
from inference_brain.maps.guessed import GuessedMap
from inference_brain.maps.hits import NEVER, Hit, Hits
from inference_brain.maps.siblings import Siblings

__all__ = ["NEVER", "CacheMaps", "DriverPlace", "GuessedMap", "Hit", "Hits", "Siblings"]
