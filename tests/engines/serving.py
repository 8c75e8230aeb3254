"""`vllm serve` as a process, with whatever its connector is told."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx

from tests.engines.vllm_process import QUIET
from tests.live import wait_until
from tests.processes import Process

START_SECONDS: Final = 300.0
STOP_SECONDS: Final = 60.0


@dataclass
class Server:
    http: httpx.Client
    told: Any
    log_file: Path
    process: Process

    @property
    def log(self) -> str:
        return self.log_file.read_text(errors="replace")

    def stop(self) -> None:
        """In order, so that it leaves notes for the next one."""
        self.process.terminate()
        try:
            self.process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        with contextlib.suppress(ProcessLookupError):
            # Those that computed for it outlive one that was killed.
            os.killpg(self.process.pid, signal.SIGKILL)

    def ask(self, tokens: list[int], claim: str | None, request: str = "") -> tuple[list[int], int]:
        """What it answers, and how much of the prompt it did not compute. `request`: its name."""
        asked = {
            "model": "tiny",
            "prompt": tokens,
            "max_tokens": 12,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            "detokenize": False,
            **({"kv_transfer_params": {"tidegate": claim}} if claim else {}),
        }
        headers = {"X-Request-Id": request} if request else {}
        answer = self.http.post("/v1/completions", json=asked, headers=headers)
        assert answer.status_code == 200, answer.text
        told: dict[str, Any] = answer.json()
        cached = (told["usage"].get("prompt_tokens_details") or {}).get("cached_tokens", 0)
        return told["choices"][0]["token_ids"], cached or 0


@contextlib.contextmanager
def serving(
    model: Path, told: object, log: Path, *options: str, environment: Mapping[str, str] | None = None
) -> Iterator[Server]:
    """`told`: what `kv_connector_extra_config` says as `tidegate`; None: it has nothing of Tidegate."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    transfer = {
        "kv_connector": "TidegateConnector",
        "kv_connector_module_path": "swdriver_shim.adapters.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"tidegate": told},
    }
    command = [
        # What `vllm serve` runs; in the CPU build that looks for a package of another name.
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)),
        *("--served-model-name", "tiny", "--host", "127.0.0.1", "--port", str(port)),
        *("--dtype", "float32", "--max-model-len", "2048", "--block-size", "32", "--enforce-eager"),
        *("--no-enable-prefix-caching", "--skip-tokenizer-init", "--enable-prompt-tokens-details"),
        *(("--kv-transfer-config", json.dumps(transfer)) if told is not None else ()),
        *options,
    ]
    with log.open("a") as said:
        process = subprocess.Popen(
            command,
            env={**os.environ, **QUIET, **(environment or {})},
            stdout=said,
            stderr=said,
            process_group=0,
        )
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120) as http:
        one = Server(http, told, log, process)
        try:

            def is_up() -> bool:
                assert process.poll() is None, log.read_text()[-3000:]
                with contextlib.suppress(httpx.TransportError):
                    return http.get("/health").status_code == 200
                return False

            wait_until("it serves", is_up, START_SECONDS)
            yield one
        finally:
            one.stop()
