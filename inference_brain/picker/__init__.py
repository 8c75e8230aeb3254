"""The endpoint picker: the brain's decision for gateways that keep the connections themselves.

A gateway (Envoy, or whatever implements the Gateway API Inference Extension) sends each request here
over `ext_proc`, is told which replica serves it, and passes the answer through. The messages of one
request are an `Exchange`, without I/O; `server` moves them over gRPC; what decides is a `Router`.
"""

from inference_brain.picker.routing import Answer, Asked, Place, Refused

__all__ = ["Answer", "Asked", "Place", "Refused"]
