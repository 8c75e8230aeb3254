"""A collector of OpenTelemetry, as a process of its own: writes what it is told as lines of JSON.

python -m tests.telemetry.collector FILE        # says on which port it listens
"""

from __future__ import annotations

import contextlib
import gzip
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
    ExportMetricsServiceResponse,
)
from opentelemetry.proto.common.v1.common_pb2 import KeyValue

from console.environment import PROJECT


def attributes(pairs: Any) -> dict[str, str]:
    return {pair.key: pair.value.string_value for pair in pairs if isinstance(pair, KeyValue)}


def told(request: ExportMetricsServiceRequest) -> Iterator[dict[str, Any]]:
    """Each data point, with its metric and its resource."""
    for of_resource in request.resource_metrics:
        resource = attributes(of_resource.resource.attributes)
        for of_scope in of_resource.scope_metrics:
            for metric in of_scope.metrics:
                kind = metric.WhichOneof("data")
                data = getattr(metric, kind)
                for point in data.data_points:
                    yield {
                        "resource": resource,
                        "name": metric.name,
                        "unit": metric.unit,
                        "kind": kind,
                        "is_monotonic": getattr(data, "is_monotonic", None),
                        "labels": attributes(point.attributes),
                        **values_of(point, kind),
                    }


def values_of(point: Any, kind: str) -> dict[str, Any]:
    if kind == "histogram":
        return {
            "count": point.count,
            "sum": point.sum,
            "counts": list(point.bucket_counts),
            "bounds": list(point.explicit_bounds),
        }
    return {"value": getattr(point, point.WhichOneof("value"))}


def main() -> None:
    with Path(sys.argv[1]).open("a") as log:

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                if self.headers.get("content-encoding") == "gzip":
                    body = gzip.decompress(body)
                points = list(told(ExportMetricsServiceRequest.FromString(body)))
                log.write(json.dumps({"path": self.path, "points": points}) + "\n")
                log.flush()
                answer = ExportMetricsServiceResponse().SerializeToString()
                self.send_response(200)
                self.send_header("content-type", "application/x-protobuf")
                self.send_header("content-length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, *_: object) -> None:
                """Nobody reads it."""

        server = HTTPServer(("127.0.0.1", 0), Handler)
        print(server.server_address[1], flush=True)
        server.serve_forever()


@dataclass
class Collector:
    url: str
    log: Path

    def points(self) -> list[dict[str, Any]]:
        """All that it was told so far, in order. A line that is being written is left for later."""
        *lines, _ = self.log.read_text().split("\n")
        return [point for line in lines for point in json.loads(line)["points"]]

    def last(self, name: str, **labels: str) -> dict[str, Any] | None:
        found = [
            point
            for point in self.points()
            if point["name"] == name and labels.items() <= point["labels"].items()
        ]
        return found[-1] if found else None


@contextlib.contextmanager
def collector(directory: Path) -> Iterator[Collector]:
    log = directory / "told.jsonl"
    log.touch()
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.telemetry.collector", str(log)],
        cwd=PROJECT,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout
    try:
        yield Collector(f"http://127.0.0.1:{int(process.stdout.readline())}", log)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


if __name__ == "__main__":
    main()
