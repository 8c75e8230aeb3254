"""What transformers makes of the same folders and chats. UPDATE_GOLDENS=1 writes it down."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from inference_brain.tokens import BadMessages, Chat, load
from inference_brain.tokens.messages import prepare, prepare_tools
from tests.inference_brain.chat_shapes import CHATS, GOLDENS, SHAPES, write_folder

pytestmark = pytest.mark.models
pytest.importorskip("transformers", reason="transformers is in the environment of `make test-models`")


def made_by_transformers(name: str, folder: Path) -> dict[str, Any]:
    from transformers import PreTrainedTokenizerFast

    theirs, ours = PreTrainedTokenizerFast.from_pretrained(str(folder)), load(folder)
    made: dict[str, Any] = {}
    for case, fields in CHATS.items():
        chat = Chat(**fields)
        chosen = ours.choose(chat)
        messages = prepare(chat.messages, chosen.content_format, has_developer=chosen.has_developer)
        variables = {**chat.variables(), "continue_final_message": chat.continue_final_message}
        asked = {"conversation": messages, "tools": prepare_tools(chat.tools), **variables}
        try:
            text = theirs.apply_chat_template(tokenize=False, **asked)
            tokens = theirs.apply_chat_template(return_dict=False, **asked)
        except Exception as error:  # noqa: BLE001  templates end in any
            # What transformers says of a final message that it does not find quotes it all.
            because = "" if "continue_final_message" in str(error) else str(error)
            made[case] = {"text": None, "because": because}
        else:
            made[case] = {"text": text, "tokens": list(tokens)}
    return made


@pytest.mark.parametrize("name", SHAPES)
def test_goldens_are_what_transformers_makes(name: str, tmp_path: Path) -> None:
    made = made_by_transformers(name, write_folder(name, tmp_path / name))
    path = GOLDENS / f"{name}.json"
    if os.environ.get("UPDATE_GOLDENS"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(made, ensure_ascii=False, indent=1) + "\n")
    assert json.loads(path.read_text()) == made


@pytest.mark.parametrize("name", SHAPES)
def test_completions_are_tokenized_as_transformers_does(name: str, tmp_path: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    folder = write_folder(name, tmp_path / name)
    theirs, ours = PreTrainedTokenizerFast.from_pretrained(str(folder)), load(folder)
    for text in ("", " ", "the weather", "<|im_end|> é 東京\n\n\n", "</s> <s>  word"):
        assert list(ours.text(text)) == theirs(text)["input_ids"]
        assert (
            list(ours.text(text, add_special_tokens=False))
            == theirs(text, add_special_tokens=False)["input_ids"]
        )


def test_two_settings_that_exclude_each_other() -> None:
    with pytest.raises(BadMessages, match="can't both be set"):
        Chat([], continue_final_message=True).variables()
