"""Which columns are cached for whom and until when. No bytes, no clocks, no sockets."""
