"""The bytes: in and out of slots, between tiers, and to another home."""
