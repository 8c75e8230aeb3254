"""What prompts cost the brain: a conversation's next turn, its keys, its template, and all of it anew.

A conversation has 32k tokens in 64 messages of prose. Its tokenizer is trained on this project's
documents when the benchmark begins, and the template has the shape of Qwen 3's, which looks through all
messages twice. The next turn adds an answer of 300 tokens and a question of 100.
"""

from __future__ import annotations

import asyncio
import gc
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from benchmarks.harness import Row, limited, options, percentile, progress, show
from console.environment import PROJECT
from inference_brain.tokens import Chat, PromptTokenizer, TokenService, load
from inference_brain.tokens import environment as environments
from inference_brain.tokens.messages import prepare
from swdriver_shim.keys import Keys, Namespace
from tests.inference_brain.chat_shapes import TEMPLATES

VOCABULARY = 16_384
MESSAGES, TOKENS = 64, 32_768
ANSWER, QUESTION = 300, 100
NEXT_TURN_MS, SHORT_US = 2.0, 300.0
KEYS = Keys("acme", b"k" * 32, Namespace("bench", "1", "bf16", "full"))
Messages = list[dict[str, str]]


def prose() -> list[str]:
    paths = sorted(PROJECT.glob("docs/**/*.md"))
    return [path.read_text() for path in paths]


def tokenizer_of(texts: Sequence[str], folder: Path) -> PromptTokenizer:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        show_progress=False,
    )
    made.train_from_iterator(texts, trainer)
    made.save(str(folder / "tokenizer.json"))
    config = {
        "eos_token": "<|im_end|>",
        "chat_template": (TEMPLATES / "qwen3.jinja").read_text(),
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return load(folder)


class Writer:
    """Messages of so many tokens, none like another."""

    def __init__(self, tokenizer: PromptTokenizer, texts: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._ids = tokenizer.encode("\n\n".join(texts))
        self._at = 0
        self._count = 0

    def message(self, role: str, tokens: int) -> dict[str, str]:
        self._count += 1
        if self._at + tokens > len(self._ids):
            self._at = 0
        text = self._tokenizer.decode(self._ids[self._at : self._at + tokens])
        self._at += tokens
        return {"role": role, "content": f"{self._count}. {text}"}

    def conversation(self) -> Messages:
        roles = ("user", "assistant")
        made = [self.message(roles[turn % 2], TOKENS // MESSAGES) for turn in range(MESSAGES)]
        return [*made[:-1], {**made[-1], "role": "user"}]

    def next_turn(self, messages: Messages) -> Messages:
        return [*messages, self.message("assistant", ANSWER), self.message("user", QUESTION)]


def took(do: Callable[[], object]) -> float:
    began = time.perf_counter()
    do()
    return time.perf_counter() - began


async def timed(doing: Any) -> tuple[float, Any]:
    began = time.perf_counter()
    made = await doing
    return time.perf_counter() - began, made


async def next_turn_rows(tokenizer: PromptTokenizer, writer: Writer, effort: int) -> list[Row]:
    turns, keyed, anew, hashed, reused = [], [], [], [], []
    for number in range(effort):
        service = TokenService()
        messages = writer.conversation()
        first, tokens = await timed(service.chat(tokenizer, "acme", Chat(messages)))
        anew.append(first)
        hashed.append(took(lambda tokens=tokens: tokens.prompt(KEYS)))  # type: ignore[misc]
        for _ in range(8):
            messages = writer.next_turn(messages)
            seconds, tokens = await timed(service.chat(tokenizer, "acme", Chat(messages)))
            turns.append(seconds)
            keyed.append(took(lambda tokens=tokens: tokens.prompt(KEYS)))  # type: ignore[misc]
            reused.append(tokens.reused / len(tokens))
        assert list(tokens.ids) == list(tokenizer.chat(Chat(messages))), number
        service.close()
        gc.collect()
    middle, whole = statistics.median(turns) * 1e3, statistics.median(anew) * 1e3
    keys, cold = statistics.median(keyed) * 1e3, statistics.median(hashed) * 1e3
    more = {"p99": percentile(turns, 0.99) * 1e6, "reused %": 100 * statistics.mean(reused)}
    return [
        limited("tokenize.next_turn", middle, "ms", NEXT_TURN_MS, more),
        Row("tokenize.next_turn.keys", keys, "ms", "hashing all", cold / keys),
        Row("tokenize.new_conversation", whole, "ms", "the next turn", middle / whole),
    ]


async def short_row(tokenizer: PromptTokenizer, writer: Writer, effort: int) -> Row:
    service = TokenService()
    system = writer.message("system", 200)
    times = []
    for _ in range(40 * effort):
        chat = Chat([system, writer.message("user", 60)])
        times.append((await timed(service.chat(tokenizer, "acme", chat)))[0])
    service.close()
    middle = statistics.median(times) * 1e6
    return limited("tokenize.short", middle, "µs", SHORT_US)


def render_row(tokenizer: PromptTokenizer, writer: Writer, effort: int) -> Row:
    """Beside the same environment without bounds, which is what transformers renders with."""
    chat = Chat(writer.conversation())
    chosen = tokenizer.choose(chat)
    messages = prepare(chat.messages, chosen.content_format, has_developer=chosen.has_developer)
    variables = {**tokenizer.special_tokens, "messages": messages, "add_generation_prompt": True}
    plain = environments.plain().from_string(chosen.template.source)
    ours, theirs = [], []
    for _ in range(10 * effort):
        ours.append(took(lambda: chosen.template.render(variables)))
        theirs.append(took(lambda: plain.render(variables)))
    middle = statistics.median(ours) * 1e6
    return Row(
        "tokenize.render", middle, "µs", "without bounds", statistics.median(theirs) * 1e6 / middle
    )


async def stall_row(tokenizer: PromptTokenizer, writer: Writer) -> Row:
    """How long the event loop stands still while new conversations are tokenized, beside tokenizing one
    on it."""
    service = TokenService()
    chats = [Chat(writer.conversation()) for _ in range(4)]
    on_it = statistics.mean(took(lambda chat=chat: tokenizer.chat(chat)) for chat in chats)  # type: ignore[misc]
    is_over, gaps = False, []

    async def tick() -> None:
        last = time.perf_counter()
        while not is_over:
            await asyncio.sleep(0.001)
            gaps.append(time.perf_counter() - last - 0.001)
            last = time.perf_counter()

    ticking = asyncio.create_task(tick())
    await asyncio.gather(*(service.chat(tokenizer, "acme", chat) for chat in chats))
    is_over = True
    await ticking
    service.close()
    longest = percentile(gaps, 0.99) * 1e3
    return Row("tokenize.stall.p99", longest, "ms", "on the event loop", on_it * 1e3 / longest)


async def memory_row(tokenizer: PromptTokenizer, writer: Writer) -> Row:
    service = TokenService()
    total = 0
    for _ in range(4):
        tokens = await service.chat(tokenizer, "acme", Chat(writer.conversation()))
        assert tokens is not None
        tokens.prompt(KEYS)
        total += len(tokens)
    service.close()
    return Row("tokenize.bytes_per_token", service.turns.bytes / total, "B")


async def rows(effort: int) -> list[Row]:
    progress("training a tokenizer")
    texts = prose()
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = tokenizer_of(texts, Path(folder))
    writer = Writer(tokenizer, texts)
    progress("the next turn")
    made = await next_turn_rows(tokenizer, writer, effort)
    progress("short prompts, templates, stalls, memory")
    made.append(await short_row(tokenizer, writer, effort))
    made.append(render_row(tokenizer, writer, effort))
    made.append(await stall_row(tokenizer, writer))
    made.append(await memory_row(tokenizer, writer))
    return made


def main() -> None:
    given = options(__doc__)
    show("Tokens", asyncio.run(rows(2 if given.quick else 8)), given.json)


if __name__ == "__main__":
    main()
