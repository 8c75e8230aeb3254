"""What is cached for whom, until when, and what goes first. No bytes, no clocks, no sockets."""
