"""Identities, certificates, trust, capabilities and signed confirmations."""
