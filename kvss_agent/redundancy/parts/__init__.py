"""The parts of a shard's fragments. `redundancy.fragments.Fragments` is what callers use."""
