"""Requests that are answered piece by piece: HTTP/1.1 over TCP, TLS and Unix sockets."""

from kvss_agent.http.client.client import Answer, Client, Sent, Timeouts
from kvss_agent.http.client.failures import Late, Lost, Unreachable, UpstreamFailed

__all__ = ["Answer", "Client", "Late", "Lost", "Sent", "Timeouts", "Unreachable", "UpstreamFailed"]
