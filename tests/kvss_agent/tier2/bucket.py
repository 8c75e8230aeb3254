"""A real S3 server in a process of its own, that can be killed and started again."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from urllib.parse import urlencode

from console.stack.endpoint import free_port
from tests.live import wait_until

BUCKET = "columns"
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "tests", "AWS_SECRET_ACCESS_KEY": "of-tier-2"}


class Server:
    """moto's server. It forgets everything when it is killed, as a bucket does that somebody removed."""

    def __init__(self) -> None:
        self.port = free_port()
        self.endpoint = f"http://127.0.0.1:{self.port}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self.port)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, **CREDENTIALS},
        )
        wait_until("the S3 server answers", self._answers)

    def kill(self) -> None:
        if self._process:
            self._process.kill()
            self._process.wait()
            self._process = None

    def make_bucket(self, name: str = BUCKET) -> None:
        assert self._put(f"/{name}") == 200

    def put_object(self, key: str, content: bytes) -> None:
        assert self._put(f"/{BUCKET}/{key}", content.decode()) == 200

    def keep_versions(self, name: str) -> None:
        enabled = "<VersioningConfiguration><Status>Enabled</Status></VersioningConfiguration>"
        assert self._put(f"/{name}?versioning", enabled) == 200

    def make_key(self, user: str, bucket: str) -> tuple[str, str]:
        """An access key, and its secret, that may list and read this bucket and nothing else."""
        arn = f"arn:aws:s3:::{bucket}"
        may = {
            "Effect": "Allow",
            "Action": ["s3:ListBucket", "s3:GetObject"],
            "Resource": [arn, f"{arn}/*"],
        }
        policy = json.dumps({"Version": "2012-10-17", "Statement": [may]})
        self._iam(Action="CreateUser", UserName=user)
        self._iam(Action="PutUserPolicy", UserName=user, PolicyName="read", PolicyDocument=policy)
        made = self._iam(Action="CreateAccessKey", UserName=user)
        [key] = re.findall("<AccessKeyId>(.+)</AccessKeyId>", made)
        [secret] = re.findall("<SecretAccessKey>(.+)</SecretAccessKey>", made)
        return key, secret

    def want_keys(self) -> None:
        """From now on who asks has to have signed it with a key that may."""
        assert self._post("/moto-api/reset-auth", "0")[0] == 200

    def _iam(self, **fields: str) -> str:
        scope = "Credential=x/20260101/us-east-1/iam/aws4_request"
        headers = {
            "Authorization": f"AWS4-HMAC-SHA256 {scope}, SignedHeaders=host, Signature=x",
            "Content-Type": "application/x-www-form-urlencoded",
        }
        status, answer = self._post("/", urlencode({**fields, "Version": "2010-05-08"}), headers)
        assert status == 200, answer
        return answer

    def _post(self, path: str, body: str, headers: Mapping[str, str] | None = None) -> tuple[int, str]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        with contextlib.closing(connection):
            connection.request("POST", path, body, dict(headers or {}))
            answer = connection.getresponse()
            return answer.status, answer.read().decode()

    def _put(self, path: str, body: str = "") -> int:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        with contextlib.closing(connection):
            connection.request("PUT", path, body)
            return connection.getresponse().status

    def _answers(self) -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        with contextlib.closing(connection), contextlib.suppress(OSError):
            connection.request("GET", "/moto-api/")
            return connection.getresponse().status == 200
        return False


@contextlib.contextmanager
def running() -> Iterator[Server]:
    server = Server()
    try:
        server.start()
        yield server
    finally:
        server.kill()
