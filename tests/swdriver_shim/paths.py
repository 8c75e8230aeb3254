"""Paths of homes."""

from __future__ import annotations

from swdriver_shim.data_plane.paths import PathSpec

RAIL = PathSpec("chat", "rail", "cs1", 2, "leaf1", "leaf1", "ax1")
SPINE = PathSpec("chat", "spine", "cs1", 2, "leaf1", "leaf2", "ax2", link="leaf1-spine1")
