"""The Cluster Server."""
