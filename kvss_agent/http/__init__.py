"""HTTP between processes: a bounded server, what the control APIs share, and bounded requests."""
