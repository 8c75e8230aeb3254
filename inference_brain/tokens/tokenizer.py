"""A model's tokenizer and chat templates: from messages or text to tokens, and back."""

from __future__ import annotations

import itertools
import os
from array import array
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from tokenizers import Tokenizer, models, processors

from inference_brain.tokens import folder as folders
from inference_brain.tokens import splits
from inference_brain.tokens.content_format import content_format, knows_developer
from inference_brain.tokens.errors import (
    FAR,
    HALF_A_CHARACTER,
    BadMessages,
    BadTemplate,
    BadTokenizer,
    TokensError,
    TooLong,
    far_too_long,
)
from inference_brain.tokens.messages import Chat, ContentFormat, prepare, prepare_tools
from inference_brain.tokens.sandbox import Template
from telemetry.decoder import excerpt

# Each call computes in the thread that it is in, and no pool of the library's has to be woken for it.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
_CONTINUED: Final = "CONTINUE_FINAL_MESSAGE_TAG "  # as transformers marks where a message ends
_numbers: Final = itertools.count()
LONG_BYTES: Final = 6  # for each token: texts of more are rare, and may have far too many tokens
PART_CHARACTERS_MIN: Final = 4 << 10  # of a long text: so few tokens of it come from cutting
_PROBES: Final = ("a", "the cat", "1 2")


class ChatTemplate(NamedTuple):
    template: Template
    content_format: ContentFormat
    has_developer: bool


class PromptTokenizer:
    """Made by `load`. Threads may use it at the same time. `number`: no other one of this process has
    it. `cuts`: the tokens that texts may be cut before."""

    def __init__(self, folder: folders.ModelFolder) -> None:
        self.number = next(_numbers)
        self._tokenizer = folder.tokenizer
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = folder.splits_special_tokens
        if folder.adds is not None:
            _set_what_is_added(
                self._tokenizer, folder.special_tokens, begins=folder.adds[0], ends=folder.adds[1]
            )
        self.special_tokens: Mapping[str, str] = dict(folder.special_tokens)
        self._templates: dict[str, ChatTemplate] = {}
        self._broken: dict[str, str] = {}
        for name, source in folder.templates.items():
            try:
                made = Template(source)
            except BadTemplate as error:  # its tokenizer is good for completions
                self._broken[name] = str(error)
            else:
                form = content_format(made.tree)
                self._templates[name] = ChatTemplate(made, form, knows_developer(source))
        wanted = splits.cuts(
            splits.safe_tokens(self._tokenizer),
            folder.templates.values(),
            [text for name, text in self.special_tokens.items() if name == "eos_token"],
        )
        self.cuts = tuple(token.encode() for token in wanted)
        self._longest = max(map(len, self._tokenizer.get_vocab()), default=1)
        # Others look for words as a whole: a long one is one token, or none, and its part is many.
        self._may_cut = isinstance(self._tokenizer.model, models.BPE | models.Unigram)
        self.added = _what_is_added(self._tokenizer)

    @property
    def has_chat(self) -> bool:
        return bool(self._templates)

    @property
    def vocabulary(self) -> int:
        """How many tokens there are, with added ones."""
        return int(self._tokenizer.get_vocab_size(with_added_tokens=True))

    def chat(self, chat: Chat, tokens_max: int | None = None) -> array[int]:
        """The tokens of a chat's prompt. No token is added to what the template writes. Raises
        TokensError."""
        return self.encode(self.render(chat, tokens_max), tokens_max)

    def text(
        self, text: str, tokens_max: int | None = None, *, add_special_tokens: bool = True
    ) -> array[int]:
        """The tokens of a completion's prompt. Raises TokensError."""
        self.check_length(text, tokens_max)
        return self.encode(text, tokens_max, add_special_tokens=add_special_tokens)

    def render(self, chat: Chat, tokens_max: int | None = None) -> str:
        """The text of a chat's prompt. `tokens_max`: of the model. Raises TokensError."""
        chosen = self.choose(chat)
        variables = chat.variables()
        messages = prepare(chat.messages, chosen.content_format, has_developer=chosen.has_developer)
        continued = None
        if chat.continue_final_message:
            continued = _mark_end(messages[-1], chosen.template.source)
        text = chosen.template.render(
            {
                **self.special_tokens,
                **variables,
                "messages": messages,
                "tools": prepare_tools(chat.tools),
            }
        )
        if continued is not None:
            text = _until_mark(text, continued)
        self.check_length(text, tokens_max)
        return text

    def raw(self, text: str) -> bytes:
        """A text in UTF-8. Raises BadMessages."""
        try:
            return text.encode()
        except UnicodeEncodeError:
            raise BadMessages(HALF_A_CHARACTER) from None

    def encode(
        self, text: str, tokens_max: int | None = None, *, add_special_tokens: bool = False
    ) -> array[int]:
        """The tokens of any text, which is tokenized as a whole. Raises TokensError."""
        return self.encode_each([text], tokens_max, add_special_tokens=add_special_tokens)[0]

    def encode_each(
        self, texts: Sequence[str], tokens_max: int | None = None, *, add_special_tokens: bool = False
    ) -> list[array[int]]:
        """The tokens of each of these texts, without Python's lock. Raises TokensError: TooLong, without
        tokenizing all of it, where together they have far more tokens than the model takes."""
        if tokens_max is None:
            return self._encoded(texts, add_special_tokens=add_special_tokens)
        made: list[array[int]] = []
        left = FAR * tokens_max
        for some in _runs(texts, tokens_max):
            if len(some) == 1:
                self._check_parts(some[0], tokens_max, left)
            new = self._encoded(some, add_special_tokens=add_special_tokens)
            left -= sum(map(len, new))
            if left < 0:
                raise far_too_long(tokens_max)
            made += new
        return made

    def _check_parts(self, text: str, tokens_max: int, left: int) -> None:
        """Raises TooLong where a long text has more tokens than are left, without tokenizing all of it.
        Its parts may have others where it is cut: a few each, and never half of all."""
        if not self._may_cut or len(self.raw(text)) <= LONG_BYTES * tokens_max:
            return
        size = max(tokens_max, PART_CHARACTERS_MIN)
        for start in range(0, len(text), size):
            left -= len(self._encoded([text[start : start + size]])[0])
            if left < 0:
                raise far_too_long(tokens_max)

    def _encoded(self, texts: Sequence[str], *, add_special_tokens: bool = False) -> list[array[int]]:
        # The library's `encode` for one text keeps the lock, and nothing else would run meanwhile.
        encode = self._tokenizer.encode_batch_fast
        try:
            return [array("I", one.ids) for one in encode(texts, add_special_tokens=add_special_tokens)]
        except (TypeError, UnicodeEncodeError):
            raise BadMessages(HALF_A_CHARACTER) from None
        except BaseException as error:
            if _is_the_librarys(error):
                raise TokensError(f"The prompt can't be tokenized: {excerpt(str(error))}") from error
            raise

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of these tokens, without special ones. What is no token is left out. Raises
        TokensError."""
        return self._decoded([list(tokens)], skip_special_tokens=True)[0]

    def decode_each(self, tokens: Sequence[int]) -> list[str]:
        """The text of each token, special ones too. Raises TokensError."""
        return self._decoded([[one] for one in tokens], skip_special_tokens=False)

    def _decoded(self, tokens: list[list[int]], *, skip_special_tokens: bool) -> list[str]:
        # As with `encode`: the library's `decode` for one text keeps Python's lock.
        try:
            return list(self._tokenizer.decode_batch(tokens, skip_special_tokens=skip_special_tokens))
        except (OverflowError, TypeError):
            raise TokensError("A token is a number from 0 to 4294967295") from None

    def check_length(self, text: str, tokens_max: int | None) -> None:
        """Raises TooLong for more text than so many tokens can be, before it is tokenized."""
        if tokens_max is not None and len(text) > tokens_max * self._longest:
            raise TooLong(
                f"The prompt has {len(text)} characters, and the model takes {tokens_max} tokens, "
                f"of {self._longest} characters at most"
            )

    def choose(self, chat: Chat) -> ChatTemplate:
        """As transformers chooses it: by its name, or `tool_use` where there are tools."""
        name = chat.template or "default"
        if chat.template is None and chat.tools is not None and "tool_use" in self._templates:
            name = "tool_use"
        if (found := self._templates.get(name)) is not None:
            return found
        if name in self._broken:
            raise BadTemplate(self._broken[name])
        if chat.template is None and not self._templates:
            raise BadTemplate("The model has no chat template: use completions")
        names = ", ".join(sorted(self._templates)) or "none"
        raise BadTemplate(f"The model has no chat template named {excerpt(name)}; it has: {names}")


def load(folder: Path) -> PromptTokenizer:
    """The tokenizer of a model's folder. Takes up to seconds. Raises BadTokenizer."""
    try:
        return PromptTokenizer(folders.read(folder))
    except BadTokenizer:
        raise
    except BaseException as error:
        if _is_the_librarys(error):
            raise BadTokenizer(
                f"The tokenizer in {folder} can't be used: {excerpt(str(error))}"
            ) from error
        raise


def _runs(texts: Sequence[str], characters: int) -> Iterator[Sequence[str]]:
    """The texts in runs of about so many characters; a text that has more is alone."""
    start = size = 0
    for at, text in enumerate(texts):
        if at > start and size + len(text) > characters:
            yield texts[start:at]
            start, size = at, 0
        size += len(text)
    yield texts[start:]


def _is_the_librarys(error: BaseException) -> bool:
    """It raises Exception itself; what went wrong in Rust comes as a BaseException."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


class Added(NamedTuple):
    """The tokens that a completion's prompt gets before and after its own."""

    before: tuple[int, ...]
    after: tuple[int, ...]


def _set_what_is_added(
    tokenizer: Tokenizer,
    special_tokens: Mapping[str, str],
    *,
    begins: bool,
    ends: bool,
) -> None:
    """As transformers does it where the configuration says so."""
    bos = special_tokens.get("bos_token") if begins else None
    eos = special_tokens.get("eos_token") if ends else None
    pieces = [one for one in (bos, "$A", eos) if one is not None]
    ids = [(one, tokenizer.token_to_id(one)) for one in (bos, eos) if one is not None]
    if any(number is None for _, number in ids):
        return
    tokenizer.post_processor = processors.TemplateProcessing(
        single=pieces, pair=[*pieces, "$B:1"], special_tokens=ids
    )


def _what_is_added(tokenizer: Tokenizer) -> Added | None:
    """None where it depends on the text, or can't be told."""
    count = tokenizer.num_special_tokens_to_add(is_pair=False)
    if not count:
        return Added((), ())
    found = set()
    for probe in _PROBES:
        alone = tokenizer.encode(probe, add_special_tokens=False).ids
        whole = tokenizer.encode(probe, add_special_tokens=True).ids
        starts = [at for at in range(count + 1) if whole[at : at + len(alone)] == alone]
        if len(whole) != len(alone) + count or len(starts) != 1 or not alone:
            return None
        at = starts[0]
        found.add(Added(tuple(whole[:at]), tuple(whole[at + len(alone) :])))
    return found.pop() if len(found) == 1 else None


def _mark_end(message: dict[str, Any], source: str) -> str:
    """Marks where the content of a message ends, which is to be continued. Returns that content."""
    content = message["content"]
    if "content" not in source:
        raise BadTemplate("The chat template does not name the content that is to be continued")
    if isinstance(content, str):
        message["content"] = content + _CONTINUED
        return content
    for part in reversed(content):
        text: str = part["text"]
        part["text"] = text + _CONTINUED
        return text
    raise BadMessages("The last message has no text that could be continued")


def _until_mark(text: str, content: str) -> str:
    mark = _CONTINUED.strip()
    if content.strip() not in text or mark not in text:
        raise BadMessages("The chat template leaves out the end of the last message")
    at = text.rindex(mark)
    # A template that trims contents has trimmed the mark, and would have trimmed what is before it.
    return text[:at] if text.startswith(_CONTINUED, at) else text[:at].rstrip()
