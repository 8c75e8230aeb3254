"""Prompts are those of transformers: text and tokens, for the shapes of many families."""

from __future__ import annotations

import json
from array import array
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from inference_brain.tokens import (
    BadMessages,
    BadTemplate,
    BadTokenizer,
    Chat,
    PromptTokenizer,
    TemplateRefused,
    TokensError,
    TooLong,
    load,
)
from tests.inference_brain.chat_shapes import CHATS, GOLDENS, SHAPES, TEMPLATES, write_folder
from tests.inference_brain.small_tokenizers import qwen


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, PromptTokenizer]:
    root = tmp_path_factory.mktemp("models")
    return {name: load(write_folder(name, root / name)) for name in SHAPES}


def golden(name: str) -> dict[str, Any]:
    """What transformers made of each of the chats. A test of `make test-models` holds and writes it."""
    found: dict[str, Any] = json.loads((GOLDENS / f"{name}.json").read_text())
    return found


@pytest.mark.parametrize("name", SHAPES)
def test_prompts_are_those_of_transformers(name: str, tokenizers: dict[str, PromptTokenizer]) -> None:
    written = golden(name)
    assert written.keys() == CHATS.keys()
    for case, wanted in written.items():
        chat = Chat(**CHATS[case])
        if wanted["text"] is None:
            with pytest.raises(TokensError) as refusal:
                tokenizers[name].render(chat)
            assert wanted["because"] in str(refusal.value), case
        else:
            assert tokenizers[name].render(chat) == wanted["text"], case
            assert list(tokenizers[name].chat(chat)) == wanted["tokens"], case


def test_goldens_are_no_list_of_refusals() -> None:
    texts = [one["text"] for name in SHAPES for one in golden(name).values()]
    assert sum(text is not None for text in texts) > 0.8 * len(texts)


@pytest.mark.parametrize("name", SHAPES)
def test_completions_get_the_tokens_that_the_tokenizer_adds(
    name: str, tokenizers: dict[str, PromptTokenizer]
) -> None:
    tokenizer = tokenizers[name]
    assert tokenizer.added is not None
    alone = tokenizer.text("the weather", add_special_tokens=False)
    before, after = tokenizer.added
    assert list(tokenizer.text("the weather")) == [*before, *alone, *after]


def folder_with(path: Path, template: object = None, **config: object) -> Path:
    qwen().save(str(path / "tokenizer.json"))
    made = config | ({} if template is None else {"chat_template": template})
    (path / "tokenizer_config.json").write_text(json.dumps(made))
    return path


HELLO = Chat([{"role": "user", "content": "word"}])


def test_a_date_is_today(tmp_path: Path) -> None:
    tokenizer = load(folder_with(tmp_path, "{{ strftime_now('%Y-%m') }}"))
    assert tokenizer.render(HELLO) == datetime.now().strftime("%Y-%m")  # noqa: DTZ005


def test_a_model_without_a_template_says_so(tmp_path: Path) -> None:
    tokenizer = load(folder_with(tmp_path))
    assert not tokenizer.has_chat
    assert tokenizer.text("the word")
    with pytest.raises(BadTemplate, match="has no chat template: use completions"):
        tokenizer.chat(HELLO)


def test_a_template_that_is_none_is_no_obstacle_to_completions(tmp_path: Path) -> None:
    tokenizer = load(folder_with(tmp_path, "{% for x in %}"))
    assert tokenizer.text("the word")
    with pytest.raises(BadTemplate, match="is no template"):
        tokenizer.chat(HELLO)


def test_templates_are_chosen_by_name(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "plain"}, {"name": "rag", "template": "with documents"}]
    tokenizer = load(folder_with(tmp_path, named))
    assert tokenizer.render(HELLO) == "plain"
    assert tokenizer.render(Chat(HELLO.messages, template="rag")) == "with documents"
    with pytest.raises(BadTemplate, match="no chat template named other; it has: default, rag"):
        tokenizer.render(Chat(HELLO.messages, template="other"))


def test_templates_in_files_go_first(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, "in the configuration")
    (folder / "chat_template.jinja").write_text("in a file")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("for tools")
    tokenizer = load(folder)
    assert tokenizer.render(HELLO) == "in a file"
    assert tokenizer.render(Chat(HELLO.messages, tools=[])) == "for tools"


def test_a_refusal_of_the_template_is_its_own_sentence(tmp_path: Path) -> None:
    tokenizer = load(folder_with(tmp_path, "{{ raise_exception('Say please.') }}"))
    with pytest.raises(TemplateRefused, match=r"^Say please\.$"):
        tokenizer.chat(HELLO)


def test_messages_that_a_template_can_do_nothing_with(tmp_path: Path) -> None:
    tokenizer = load(folder_with(tmp_path, "{{ messages[0]['content'] + 1 }}"))
    with pytest.raises(TemplateRefused, match="can't render these messages"):
        tokenizer.chat(HELLO)


def test_what_is_too_long_is_refused_before_it_is_tokenized(tmp_path: Path) -> None:
    tokenizer = load(folder_with(tmp_path, "{{ messages[0].content }}"))
    with pytest.raises(TooLong, match="the model takes 10 tokens"):
        tokenizer.chat(Chat([{"role": "user", "content": "word " * 1000}]), tokens_max=10)
    with pytest.raises(TooLong):
        tokenizer.text("word " * 1000, tokens_max=10)
    assert tokenizer.text("word " * 4, tokens_max=10)


@pytest.mark.parametrize("shape", sorted(SHAPES))
def test_of_what_is_far_too_long_only_a_beginning_is_tokenized(
    shape: str, tokenizers: dict[str, PromptTokenizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Emojis are few characters for their tokens, and words many: also where words come first."""
    made, tokenized, tokens_max = tokenizers[shape], list[int](), 1000
    encoded = PromptTokenizer._encoded

    def counted(
        self: PromptTokenizer, texts: Sequence[str], *, add_special_tokens: bool = False
    ) -> list[array[int]]:
        tokenized.append(sum(map(len, texts)))
        return encoded(self, texts, add_special_tokens=add_special_tokens)

    monkeypatch.setattr(PromptTokenizer, "_encoded", counted)
    words = " temperature" * (tokens_max // 2)
    for first, then in (
        ("", "😀" * 20_000),
        ("", "x" * 8 * tokens_max),
        ("", "🦀 word 😀, " * 2000),
        (words, "😀" * len(words)),
    ):
        text = first + then
        far = len(encoded(made, [text])[0]) > 2 * tokens_max
        for texts in ([text], [text[at : at + 100] for at in range(0, len(text), 100)]):
            tokenized.clear()
            if far:
                with pytest.raises(TooLong, match="maximum context length is 1000 tokens"):
                    made.encode_each(texts, tokens_max)
                assert sum(tokenized) <= len(first) + 8 * tokens_max
            else:
                assert made.encode_each(texts, tokens_max) == encoded(made, texts)


@pytest.mark.parametrize(
    ("model", "text"),
    [
        (models.WordPiece({"[UNK]": 0, "x": 1, "##x": 2}, max_input_chars_per_word=8000), "x" * 9000),
        (models.WordLevel({"temperature": 0}), "temperature " * 900),
    ],
    ids=["word pieces", "words"],
)
def test_a_text_is_not_cut_where_words_are_looked_for_as_a_whole(
    model: models.Model, text: str, tmp_path: Path
) -> None:
    """A part of a word that has one token has many, or none."""
    made = Tokenizer(model)
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.add_special_tokens(["<" + "x" * 20 + ">"])  # else it has too many characters
    made.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load(tmp_path)
    assert tokenizer.text(text, 1000) == tokenizer.text(text)


def test_half_a_character_is_no_text(tmp_path: Path) -> None:
    tokenizer = load(folder_with(tmp_path))
    with pytest.raises(BadMessages, match="half a character"):
        tokenizer.text("\ud800")


def test_what_was_tokenized_can_be_read_again(tmp_path: Path) -> None:
    tokenizer = load(folder_with(tmp_path))
    text = "<|im_start|>the weather, 東京 é<|im_end|>"
    ids = tokenizer.text(text)
    assert tokenizer.decode_each(ids)[:2] == ["<|im_start|>", "the"]
    assert tokenizer._tokenizer.decode(list(ids), skip_special_tokens=False) == text
    assert tokenizer.decode(tokenizer.text(text)) == "the weather, 東京 é"
    with pytest.raises(TokensError, match="A token is a number"):
        tokenizer.decode([-1])


@pytest.mark.parametrize("added", [(True, True), (True, False), (False, True), (False, False)])
def test_the_configuration_says_what_completions_get(tmp_path: Path, added: tuple[bool, bool]) -> None:
    begins, ends = added
    config = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    folder = folder_with(tmp_path, None, add_bos_token=begins, add_eos_token=ends, **config)
    text = "".join(load(folder).decode_each(load(folder).text("the word")))
    assert text == "<|im_start|>" * begins + "the word" + "<|im_end|>" * ends


def test_tokens_of_the_configuration_are_tokens(tmp_path: Path) -> None:
    folder = folder_with(
        tmp_path,
        eos_token="<|mine|>",
        extra_special_tokens=["<|other|>"],
        added_tokens_decoder={"900": {"content": "<|third|>", "special": False}},
    )
    tokenizer = load(folder)
    assert len(tokenizer.text("<|mine|><|other|><|third|>")) == 3


def test_a_tokenizer_without_a_longest_text_is_read(tmp_path: Path) -> None:
    """transformers writes the whole number nearest to 1e30, which is more than other integers may be."""
    folder = folder_with(tmp_path, "{{ bos_token }}", bos_token="<s>", model_max_length=int(1e30))
    assert len(load(folder).text("<s>")) == 1


@pytest.mark.parametrize(
    ("write", "because"),
    [
        ({}, "There is no tokenizer.json"),
        ({"tokenizer.json": b"{}"}, "is no tokenizer"),
        ({"tokenizer.json": b"\xff"}, "is no tokenizer"),
        ({"tokenizer_config.json": b"[1]"}, "tokenizer_config.json can't be read"),
        ({"chat_template.jinja": b"\xff"}, "is not UTF-8"),
        ({"tokenizer_config.json": b'{"chat_template": [{}]}'}, "has no text"),
    ],
)
def test_a_folder_that_is_none(tmp_path: Path, write: dict[str, bytes], because: str) -> None:
    if write and "tokenizer.json" not in write:
        folder_with(tmp_path)
    for name, raw in write.items():
        (tmp_path / name).write_bytes(raw)
    with pytest.raises(BadTokenizer, match=because):
        load(tmp_path)


def test_a_tokenizer_that_can_be_read_and_not_be_used(tmp_path: Path) -> None:
    """It has no token for what is unknown, or one whose name can't be added to a prompt."""
    made = Tokenizer(models.WordLevel({"<s>": 0}, unk_token="[UNK]"))
    made.post_processor = processors.TemplateProcessing(
        single=["<s>", "$A"], special_tokens=[("<s>", 0)]
    )
    made.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(BadTokenizer, match=r"can't be used: .*UNK"):
        load(tmp_path)
    made = Tokenizer(models.WordLevel({"<s:1:2>": 0, "[UNK]": 1}, unk_token="[UNK]"))
    made.save(str(tmp_path / "tokenizer.json"))
    config = {"add_bos_token": True, "bos_token": "<s:1:2>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(BadTokenizer, match="can't be used"):
        load(tmp_path)


def test_every_template_is_tried() -> None:
    used = {file for name, shape in SHAPES.items() for file in (name, *shape.more.values())}
    assert {path.stem for path in TEMPLATES.glob("*.jinja")} == used
