"""Numbers on their way out of a process: to Redis, to OTLP, to Prometheus. No Django."""
