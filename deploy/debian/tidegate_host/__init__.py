"""Tidegate on a Debian machine without Kubernetes. Nothing but the standard library: it runs before
anything is installed."""
