"""`python -m console.serve` refuses a certificate that it could not serve with, before anything else."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from console import serve


def test_a_certificate_needs_its_key(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        serve.main(["--tls-certificate", "host.pem"])
    assert ended.value.code == 2
    assert "both or not at all" in capsys.readouterr().err


def test_a_file_that_is_no_certificate_stops_the_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for text in (None, "no certificate"):
        path = tmp_path / f"{text}.pem"
        if text:
            path.write_text(text)
        given = ["--tls-certificate", str(path), "--tls-key", str(path)]
        assert serve.main(given) == os.EX_CONFIG
        assert "The certificate can't be used" in capsys.readouterr().err
