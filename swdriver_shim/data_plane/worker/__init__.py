"""The driver in two processes: the one that decides, and workers that have its shards. See `server`."""
