"""Traces, and what the cache would have done for them."""
