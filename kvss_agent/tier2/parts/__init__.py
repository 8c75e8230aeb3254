"""The parts of a store of tier 2. `tier2.store.Tier2` is what callers use."""
