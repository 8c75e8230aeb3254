"""The shell that every page stands in: frame, home, health, errors, and what every request carries."""
