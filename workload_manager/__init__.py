"""The manager: keeps one instance of a workload's engine running, and says how it is."""
