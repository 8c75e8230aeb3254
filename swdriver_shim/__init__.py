"""The driver: what is cached for whom, until when, and why something was missed. No Django."""
