"""Views that people have saved: a page with its range, filters and comparison, under a name."""
