"""The brain's prompts are those of vLLM: its messages, its tools, its choice of a form, its text."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from inference_brain.tokens import Chat, TokensError, load
from tests.inference_brain.chat_shapes import CHATS, SHAPES, write_folder

# What engines import warns of much.
pytestmark = [
    pytest.mark.engines,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.timeout(600),
]
# As a request to vLLM has it.
FIELDS = {"template_kwargs": "chat_template_kwargs"}


def of_vllm(folder: Path, fields: dict[str, Any]) -> str | None:
    """The text that vLLM makes of a request; None where it refuses."""
    from transformers import PreTrainedTokenizerFast
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.exceptions import VLLMValidationError
    from vllm.renderers.chat_utils import parse_chat_messages
    from vllm.renderers.hf import resolve_chat_template_content_format, safe_apply_chat_template

    tokenizer = PreTrainedTokenizerFast.from_pretrained(str(folder))
    config = SimpleNamespace(
        code_revision=None,
        enable_prompt_embeds=False,
        hf_config=SimpleNamespace(model_type="none"),
        model=str(folder),
        multimodal_config=None,
        revision=None,
        tokenizer=str(folder),
        tokenizer_revision=None,
        trust_remote_code=False,
    )
    asked = {FIELDS.get(name, name): value for name, value in fields.items()}
    request = ChatCompletionRequest.model_validate({"model": "m", **asked})
    tools = [tool.model_dump() for tool in request.tools] if request.tools else None
    params = request.build_chat_params(None, "auto").with_defaults({"tools": tools, "tokenize": False})
    form = resolve_chat_template_content_format(None, tools, "auto", tokenizer, model_config=config)
    messages, _, _ = parse_chat_messages(list(request.messages), config, form)
    kwargs = params.get_apply_chat_template_kwargs()
    try:
        return str(safe_apply_chat_template(config, tokenizer, messages, **kwargs))
    except VLLMValidationError:
        return None


@pytest.mark.parametrize("name", SHAPES)
def test_prompts_are_those_of_vllm(name: str, tmp_path: Path) -> None:
    folder = write_folder(name, tmp_path / name)
    ours = load(folder)
    for case, fields in CHATS.items():
        try:
            text = ours.render(Chat(**fields))
        except TokensError:
            text = None
        assert text == of_vllm(folder, fields), case
