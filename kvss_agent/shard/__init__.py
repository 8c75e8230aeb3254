"""One shard: its slots in memory, seals, leases and state machine."""
