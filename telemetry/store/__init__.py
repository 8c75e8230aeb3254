"""Rows in PostgreSQL: reading, writing, merging and rolling up."""
