"""What an engine needs is found, or missed with a sentence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from workload_manager.preparation import Unprepared, _tokenizer
from workload_manager.spec import TokenizerSpec


def tokenizer(store: Path, **given: Any) -> Path:
    return _tokenizer(msgspec.convert(given, TokenizerSpec), store)


def test_a_tokenizer_is_where_the_specification_says(tmp_path: Path) -> None:
    (tmp_path / "mounted").mkdir()
    assert tokenizer(tmp_path, folder=str(tmp_path / "mounted")) == tmp_path / "mounted"


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({}, "neither a folder nor an upload"),
        ({"folder": "/nowhere/at/all"}, "no such file or directory"),
        ({"sha256": "0" * 64}, "There is no tokenizer 0000000000000000"),
        ({"sha256": "0" * 64, "url": "http://127.0.0.1:9/x"}, "can't be reached"),
    ],
)
def test_a_tokenizer_that_is_missing_is_said(
    tmp_path: Path, given: dict[str, str], sentence: str
) -> None:
    with pytest.raises(Unprepared, match=sentence) as refusal:
        tokenizer(tmp_path, **given)
    assert refusal.value.reason == "TokenizerMissing"
