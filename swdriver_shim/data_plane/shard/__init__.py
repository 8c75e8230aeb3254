"""One shard of the driver: `Shard`, and what it is made of."""

from swdriver_shim.data_plane.shard.shard import Shard

__all__ = ["Shard"]
