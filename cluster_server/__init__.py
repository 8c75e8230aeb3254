"""The Cluster Server: what runs on the machines of a cluster, and what is to run."""
