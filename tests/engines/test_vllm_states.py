"""A model with layers that keep a state is refused by the connector before the engine serves, in a
sentence."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.engines.vllm_process import QUIET, SHAPE

pytestmark = [pytest.mark.engines, pytest.mark.timeout(600)]

START = """
import sys
from vllm import LLM
from vllm.config import KVTransferConfig
transfer = KVTransferConfig(
    kv_connector="TidegateConnector",
    kv_connector_module_path="swdriver_shim.adapters.vllm.connector",
    kv_role="kv_both",
    kv_load_failure_policy="recompute",
    kv_connector_extra_config={"tidegate": sys.argv[2]},
)
LLM(
    model=sys.argv[1], skip_tokenizer_init=True, enforce_eager=True, max_model_len=512, dtype="float32",
    enable_prefix_caching=sys.argv[3] == "align", kv_transfer_config=transfer,
)
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Falcon-H1: each layer has attention and Mamba."""
    import torch
    from transformers import FalconH1Config, FalconH1ForCausalLM

    directory = tmp_path_factory.mktemp("model")
    torch.manual_seed(7)
    mamba: dict[str, Any] = {"mamba_d_ssm": 256, "mamba_n_heads": 8, "mamba_d_head": 32}
    config = FalconH1Config(num_hidden_layers=2, mamba_d_state=16, mamba_n_groups=1, **mamba, **SHAPE)
    FalconH1ForCausalLM(config).save_pretrained(directory)
    return directory


@pytest.mark.parametrize("mode", ["none", "align"])
def test_a_model_with_states_is_refused_before_it_serves(model: Path, tmp_path: Path, mode: str) -> None:
    file = tmp_path / "tidegate.json"
    file.write_text(json.dumps({}))
    done = subprocess.run(
        [sys.executable, "-c", START, str(model), str(file), mode],
        env={**os.environ, **QUIET, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    told = done.stdout + done.stderr
    assert "Unsupported: The model has layers that keep a state (Mamba, linear attention)." in told
    assert "--mamba-cache-mode align" in told
