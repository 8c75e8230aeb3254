"""A real control plane of Kubernetes, and nodes that are a stand-in for the kubelet: see `bed`."""
