"""The parts of the backend `kubernetes` that need no Kubernetes."""
