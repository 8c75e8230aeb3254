"""A driver as a process of its own: what it is told, what it is asked, what it says of itself."""
