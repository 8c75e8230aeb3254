"""Numbers: emitting, ingesting, rolling up and querying them."""
