"""What runs first in a pod of the backend `kubernetes`: the runner, process 1 of its container."""
