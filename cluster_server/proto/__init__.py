"""The interface of the Cluster Server: `cluster.proto`, and code that `make proto` makes of it."""
