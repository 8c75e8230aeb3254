"""Orgs, the tenants: who belongs to them and with which role."""
