"""An uploaded tokenizer can take any time and memory, and only its own model waits for it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Final

import msgspec
import pytest
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers

from inference_brain.api.errors import ApiError
from inference_brain.api.requests import Chat as ChatRequest
from inference_brain.desired import ServedModel
from inference_brain.prompts import Prompts
from inference_brain.tokens import (
    Chat,
    TokenizerStopped,
    TokensError,
    TokenService,
    TooLong,
    UploadedTokenizer,
    is_uploaded,
    load,
)
from tests.inference_brain.brains import model
from tests.inference_brain.chat_shapes import conversation, write_folder

HASH: Final = "ab" * 32
SECONDS: Final = 3.0
ENDLESS: Final = (
    "{% if messages[0].content == 'slow' %}{% for i in range(100000) %}"
    "{% for j in range(100000) %}{{ messages|length }}{% endfor %}{% endfor %}{% endif %}fast"
)
GAP_SECONDS: Final = 2.5  # that the loop may stand still on a busy machine; it was 5 to 9


def _letters() -> Tokenizer:
    symbols = pre_tokenizers.ByteLevel.alphabet()
    return Tokenizer(models.BPE(vocab={one: at for at, one in enumerate(symbols)}, merges=[]))


def backtracking() -> Tokenizer:
    made = _letters()
    made.pre_tokenizer = pre_tokenizers.Split(Regex("(?:a|a){21}[^a]"), "isolated")
    return made


def growing() -> Tokenizer:
    """Of each `a` it makes 2⁴⁰."""
    made = _letters()
    made.normalizer = normalizers.Sequence([normalizers.Replace("a", "aa")] * 40)
    return made


def upload(made: Tokenizer, folder: Path, template: str = "{{ messages[0].content }}") -> Path:
    path = folder / "sha256" / HASH
    path.mkdir(parents=True)
    made.save(str(path / "tokenizer.json"))
    (path / "chat_template.jinja").write_text(template)
    return path


def served(folder: Path, name: str) -> ServedModel:
    return model([], name, tokenizer=str(folder))


def saying(text: str) -> ChatRequest:
    body = {"model": "m", "messages": [{"role": "user", "content": text}]}
    return msgspec.json.decode(msgspec.json.encode(body), type=ChatRequest)


@pytest.fixture
async def prompts() -> AsyncIterator[Callable[..., Prompts]]:
    made = Prompts(seconds=SECONDS)

    def follow(*models: ServedModel) -> Prompts:
        made.follow(models)
        return made

    yield follow
    made.close()


async def _largest_gap(until: asyncio.Event) -> float:
    loop, largest = asyncio.get_running_loop(), 0.0
    while not until.is_set():
        before = loop.time()
        await asyncio.sleep(0.005)
        largest = max(largest, loop.time() - before)
    return largest


@pytest.mark.parametrize(
    ("made", "template", "text", "why"),
    [
        (backtracking, "{{ messages[0].content }}", "a" * 4000, "took longer than 3 s"),
        (_letters, ENDLESS, "slow", "took longer|takes too long for these messages"),
    ],
    ids=["pattern", "template"],
)
async def test_others_go_on_while_a_tokenizer_takes_for_ever(
    tmp_path: Path,
    prompts: Callable[..., Prompts],
    made: Callable[[], Tokenizer],
    template: str,
    text: str,
    why: str,
) -> None:
    hostile = upload(made(), tmp_path / "red", template)
    good = upload(_letters(), tmp_path / "blue")
    family = write_folder("qwen2", tmp_path / "qwen2")
    red, blue, green = served(hostile, "red"), served(good, "blue"), served(family, "green")
    known = prompts(red, blue, green)
    for one in (red, blue, green):
        await known.tokenizer(one)
    assert [known.state(one.tokenizer) for one in (red, blue, green)] == ["ready"] * 3

    ended = asyncio.Event()
    gap = asyncio.create_task(_largest_gap(ended))
    slow = [asyncio.create_task(known.of("red", red, saying(text))) for _ in range(2)]
    done, _ = await asyncio.wait(slow, timeout=0.1)
    for number in range(8):
        for one in (blue, green):
            found = await known.of(one.name, one, saying(f"Hello {number}"))
            assert found.total > 0
    assert not done
    assert not all(one.done() for one in slow), "others waited for it"

    for late in slow:
        with pytest.raises(ApiError) as refused:
            await late
        assert refused.value.status == 400
        assert re.search(why, msgspec.json.decode(refused.value.body())["error"]["message"])
    ended.set()
    assert await gap < GAP_SECONDS
    found = await known.of("red", red, saying("Hello"))
    assert found.total > 0, "its process was not replaced"


async def test_one_that_takes_all_memory_is_replaced(
    tmp_path: Path, prompts: Callable[..., Prompts]
) -> None:
    red = served(upload(growing(), tmp_path), "red")
    known = prompts(red)
    with pytest.raises(ApiError, match=r"took more memory or time|took longer"):
        await known.of("red", red, saying("a"))
    assert (await known.of("red", red, saying("b"))).total == 1
    assert known.stopped == 1


async def test_what_is_asked_is_answered_as_in_the_brains_own_process(tmp_path: Path) -> None:
    folder = write_folder("qwen2", tmp_path / HASH)
    assert is_uploaded(folder)
    (tmp_path / "link").symlink_to(folder)
    assert is_uploaded(tmp_path / "link")
    assert not is_uploaded(tmp_path)
    here, there, service = load(folder), UploadedTokenizer(folder), TokenService()
    chat = Chat(conversation(5, 200))
    with contextlib.closing(there):
        tokens = await service.chat(there, "red", chat, 100_000)
        assert tokens is not None
        assert tokens.ids == here.chat(chat)
        text = await service.text(there, "red", "the cat — ä", 1000)
        assert text.ids == here.text("the cat — ä")
        assert await service.decode(there, "red", text.ids) == here.decode(text.ids)
        each = await service.decode_each(there, "red", text.ids)
        assert each == here.decode_each(text.ids)
        for wrong in (service.text(there, "red", "x" * 10_000, 10), service.decode(there, "red", [-1])):
            with pytest.raises(TokensError, match=r"has 10000 characters|A token is a number"):
                await wrong
        with pytest.raises(TokensError, match="half a character"):
            await service.text(there, "red", "\ud800")
        assert service.turns.bytes == 0
    service.close()


async def test_one_that_makes_many_tokens_of_few_characters_is_refused(tmp_path: Path) -> None:
    made = _letters()
    made.normalizer = normalizers.Sequence([normalizers.Replace("a", "aa")] * 12)
    there = UploadedTokenizer(upload(made, tmp_path))
    why = "maximum context length is 100 tokens"
    with contextlib.closing(there), pytest.raises(TooLong, match=why):
        await there.text("red", "a", 100)


async def test_a_process_that_somebody_has_killed_is_replaced_unseen(tmp_path: Path) -> None:
    there = UploadedTokenizer(upload(_letters(), tmp_path))
    with contextlib.closing(there):
        await there.load()
        assert there.process is not None
        os.kill(there.process, signal.SIGKILL)
        ended = os.WEXITED | os.WNOWAIT
        await asyncio.to_thread(os.waitid, os.P_PID, there.process, ended)
        assert len(await there.text("red", "abc")) == 3


async def test_what_can_not_be_loaded_is_told_by_its_process(
    tmp_path: Path, prompts: Callable[..., Prompts]
) -> None:
    folder = tmp_path / HASH
    folder.mkdir()
    (folder / "tokenizer.json").write_text("{}")
    red = served(folder, "red")
    known = prompts(red)
    assert await known.tokenizer(red) is None
    assert "is no tokenizer" in known.state(str(folder))


async def test_who_waits_for_one_that_is_no_longer_served_is_told_so(
    tmp_path: Path, prompts: Callable[..., Prompts]
) -> None:
    red = served(upload(backtracking(), tmp_path), "red")
    known = prompts(red)
    tokenizer = await known.tokenizer(red)
    assert isinstance(tokenizer, UploadedTokenizer)
    slow = [asyncio.create_task(known.of("red", red, saying("a" * 4000))) for _ in range(2)]
    await asyncio.wait(slow, timeout=0.1)
    pid = tokenizer.process
    known.follow([])
    for one in slow:
        with pytest.raises(ApiError):
            await one
    with pytest.raises(TokenizerStopped, match="no longer used"):
        await tokenizer.text("red", "b")
    assert tokenizer.process is None
    assert pid is not None
