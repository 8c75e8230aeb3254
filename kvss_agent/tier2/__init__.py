"""Tier 2: columns as sealed, content-addressed files on a disk, a shared mount or in a bucket."""
