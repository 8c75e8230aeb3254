"""`tidegatectl`, before a real console."""
