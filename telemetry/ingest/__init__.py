"""From the Redis streams to PostgreSQL: each record counts once."""
