"""How an org's columns come back, and what another policy would make of it."""
