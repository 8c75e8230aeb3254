"""The fleet: boxes and nodes, the leaves between them, drivers, and how processes join."""
