"""Bounds that several peers share: places for connections, and fair shares of a resource."""
