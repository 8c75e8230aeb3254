"""What is kept of conversations changes nothing but what has to be done again."""

from __future__ import annotations

import asyncio
import itertools
import threading
from array import array
from functools import partial
from typing import Any, NoReturn

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inference_brain.tokens import Chat, PromptTokenizer, TokenService, TooLong, load
from inference_brain.tokens import service as token_service
from inference_brain.tokens import turns as kept
from inference_brain.tokens.lanes import Lanes
from inference_brain.tokens.turns import PIECE_BYTES_MIN, Found, Place, Tokens, Turns, cut
from swdriver_shim.keys import Keys, Namespace
from tests.inference_brain.chat_shapes import conversation, write_folder

SPACE = Namespace("model", "main", "bf16", "layout")
KEYS = Keys("red", b"r" * 32, SPACE)
WIDE = Keys("red", b"r" * 32, SPACE, unit_tokens=192)
OTHER = Keys("red", b"s" * 32, SPACE)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> PromptTokenizer:
    return load(write_folder("qwen2", tmp_path_factory.mktemp("qwen2")))


@pytest.fixture(scope="module")
def mistral(tmp_path_factory: pytest.TempPathFactory) -> PromptTokenizer:
    return load(write_folder("mistral", tmp_path_factory.mktemp("mistral")))


async def test_far_too_many_tokens_are_refused_as_chat_and_as_text(
    qwen: PromptTokenizer, mistral: PromptTokenizer
) -> None:
    service, text = TokenService(), "😀" * 20_000
    for tokenizer in (qwen, mistral):
        with pytest.raises(TooLong, match="maximum context length is 2000 tokens"):
            await service.text(tokenizer, "red", text, 2000)
        with pytest.raises(TooLong, match="maximum context length is 2000 tokens"):
            await service.chat(tokenizer, "red", Chat([{"role": "user", "content": text}]), 2000)
    service.close()


async def test_the_next_turn_tokenizes_what_is_new(qwen: PromptTokenizer) -> None:
    service = TokenService()
    messages = list(conversation(9, 300))
    first = await service.chat(qwen, "red", Chat(messages))
    longer = Chat([*messages, *conversation(2, 300, "more")])
    second = await service.chat(qwen, "red", longer)
    assert first is not None
    assert second is not None
    assert first.reused == 0
    assert len(first) - second.reused < 2 * PIECE_BYTES_MIN
    assert second.ids == qwen.chat(longer)


async def test_the_next_turn_hashes_what_is_new(
    qwen: PromptTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = TokenService()
    messages = list(conversation(9, 300))
    first = await service.chat(qwen, "red", Chat(messages))
    assert first is not None
    first.prompt(KEYS)
    second = await service.chat(qwen, "red", Chat([*messages, *conversation(2, 300, "more")]))
    assert second is not None
    hashed: list[int] = []
    chain = Keys.chain

    def counted(keys: Keys, before: bytes | None, raw: bytes, *more: Any) -> tuple[bytes, list[bytes]]:
        hashed.append(len(raw) // 4)
        return chain(keys, before, raw, *more)

    monkeypatch.setattr(Keys, "chain", counted)
    prompt = second.prompt(KEYS)
    assert sum(hashed) < len(second) - second.reused + 64
    monkeypatch.undo()
    assert prompt.keys == KEYS.prompt(second.ids).keys
    assert prompt._first is second.raw  # no copy: a long prompt's tokens are larger than its text
    assert prompt.tail(len(prompt.keys), 1) == KEYS.prompt(second.ids).tail(len(prompt.keys), 1)


async def test_orgs_see_nothing_of_each_other(qwen: PromptTokenizer) -> None:
    service = TokenService()
    chat = Chat(conversation(9, 300))
    await service.chat(qwen, "red", chat)
    blue = await service.chat(qwen, "blue", chat)
    red = await service.chat(qwen, "red", chat)
    assert blue is not None
    assert red is not None
    assert blue.reused == 0
    assert red.reused > 0


async def test_models_see_nothing_of_each_other(qwen: PromptTokenizer, mistral: PromptTokenizer) -> None:
    service = TokenService()
    text = "<|im_end|></s>".join("the weather " * 100 for _ in range(5))
    for tokenizer in (qwen, mistral, qwen, mistral):
        tokens = await service.text(tokenizer, "red", text)
        assert tokens.ids == tokenizer.text(text)


HELLO = {"role": "user", "content": "Hello"}
CALL = {"type": "function", "function": {"name": "f", "arguments": "{}"}}
TOOL = {"type": "function", "function": {"name": "f", "description": "word " * 200}}


@pytest.mark.parametrize(
    ("chat", "is_short"),
    [
        (Chat([HELLO] * 20, tools=[TOOL]), True),
        (Chat([HELLO] * 2000), False),
        (Chat([{"role": "user", "content": [{"type": "text", "text": "Hello"}] * 2000}]), False),
        (Chat([HELLO], tools=[TOOL] * 200), False),
        (Chat([HELLO, {"role": "assistant", "content": None, "tool_calls": [CALL] * 2000}]), False),
        (Chat([HELLO], template_kwargs={"notes": ["word"] * 50_000}), False),
    ],
)
async def test_what_takes_long_to_render_is_not_rendered_where_everybody_waits(
    qwen: PromptTokenizer,
    monkeypatch: pytest.MonkeyPatch,
    chat: Chat,
    is_short: bool,  # noqa: FBT001
) -> None:
    threads: list[int] = []
    render = qwen.render

    def noted(*arguments: Any) -> str:
        threads.append(threading.get_ident())
        return render(*arguments)

    monkeypatch.setattr(qwen, "render", noted)
    assert await TokenService().chat(qwen, "red", chat)
    assert [one == threading.get_ident() for one in threads] == [is_short]


def test_no_more_of_a_chat_is_looked_at_than_tells_that_it_is_long() -> None:
    """Everybody waits meanwhile, and it may have hundreds of thousands of messages."""

    class Message(dict[str, str]):
        def items(self) -> NoReturn:
            raise AssertionError("it is looked at")

    message = Message(role="user", content="Hello", name="me")
    assert token_service._is_long(Chat([message] * 2000))
    with pytest.raises(AssertionError, match="it is looked at"):
        token_service._is_long(Chat([message]))


async def test_images_have_no_tokens_here(qwen: PromptTokenizer) -> None:
    part = {"type": "image_url", "image_url": {"url": "data:,"}}
    assert await TokenService().chat(qwen, "red", Chat([{"role": "user", "content": [part]}])) is None


async def test_prompts_of_tokens_are_taken_as_they_are() -> None:
    tokens = TokenService().given([1, 2, 3] * 64)
    assert tokens.prompt(KEYS).keys == KEYS.prompt([1, 2, 3] * 64).keys


PARTS = ["the weather " * 40, "</s>", "[INST]", "<s>", "word ", "é" * 300, "</s>" * 90]
texts = st.lists(st.sampled_from(PARTS), max_size=12).map("".join)


@given(
    st.lists(st.tuples(texts, st.booleans(), st.sampled_from(["red", "blue"])), max_size=12),
    st.integers(2_000, 30_000),
)
@settings(max_examples=60, deadline=None)
def test_whatever_was_asked_before_tokens_and_keys_are_the_same(
    mistral: PromptTokenizer, asked: list[tuple[str, bool, str]], bytes_max: int
) -> None:
    """Also while pieces are dropped for want of memory."""
    clock = itertools.count()
    service = TokenService(Turns(bytes_max, idle_seconds=9), clock=lambda: float(next(clock)))

    async def ask_all() -> None:
        for text, adds, org in asked:
            tokens = await service.text(mistral, org, text, add_special_tokens=adds)
            assert tokens.ids == mistral.text(text, add_special_tokens=adds)
            for keys in (KEYS, WIDE, OTHER):
                assert tokens.prompt(keys).keys == keys.prompt(tokens.ids).keys
                assert tokens.prompt(keys).keys == keys.prompt(tokens.ids).keys
            assert service.turns.bytes <= bytes_max
            assert service.turns.bytes == sum(map(service.turns.size_of, ("red", "blue")))

    asyncio.run(ask_all())
    service.close()
    service.turns.forget()
    assert service.turns.bytes == 0


@given(texts, texts)
def test_what_follows_does_not_change_where_a_text_is_cut(text: str, more: str) -> None:
    tokens = (b"</s>", b"[INST]")
    raw = (text + more).encode()
    shorter, longer = cut(text.encode(), tokens), cut(raw, tokens)
    # The last piece of the shorter one may go on.
    assert longer[: len(shorter) - 1] == shorter[:-1]
    assert b"".join(raw[one.start : one.end] for one in longer) == raw
    for piece in longer:  # nor does what was before a piece
        assert cut(raw, tokens, piece.start)[0] == piece


def test_many_special_tokens_are_not_many_pieces() -> None:
    raw = b"</s>" * 10_000
    assert len(cut(raw, (b"</s>",))) <= len(raw) / PIECE_BYTES_MIN + 1


async def test_texts_that_begin_in_the_same_way_are_told_apart(qwen: PromptTokenizer) -> None:
    service = TokenService()
    system = {"role": "system", "content": "of use to people " * 40}
    chats = [
        Chat([{**system, "content": f"{system['content']} {number}"}, *conversation(5, 300)])
        for number in range(4)
    ]
    reused = []
    for chat in (*chats, *chats):
        tokens = await service.chat(qwen, "red", chat)
        assert tokens is not None
        assert tokens.ids == qwen.chat(chat)
        reused.append(tokens.reused / len(tokens))
    assert min(reused[4:]) > 0.9


async def test_a_piece_that_goes_on_is_another(qwen: PromptTokenizer) -> None:
    """Its text begins as one that is known, and does not end where that does."""
    service = TokenService()
    text = "<|im_start|>" + "the weather " * 50
    for end in ("<|im_end|>", "<|im_", "s", "", "<|im_end|> "):
        tokens = await service.text(qwen, "red", text + end + "word", add_special_tokens=False)
        assert tokens.ids == qwen.text(text + end + "word", add_special_tokens=False)


async def test_who_has_most_gives_way(qwen: PromptTokenizer) -> None:
    service = TokenService(Turns(60_000))
    small = Chat(conversation(5, 120, "small"))
    await service.chat(qwen, "small", small)
    for number in range(8):
        await service.chat(qwen, "large", Chat(conversation(9, 300, f"large{number}")))
    again = await service.chat(qwen, "small", small)
    assert again is not None
    assert again.reused > 0
    assert service.turns.dropped > 0
    assert service.turns.bytes <= 60_000


async def test_what_is_unused_is_forgotten(qwen: PromptTokenizer) -> None:
    now = [0.0]
    service = TokenService(Turns(idle_seconds=60), clock=lambda: now[0])
    await service.chat(qwen, "red", Chat(conversation(9, 300)))
    now[0] = 61
    await service.text(qwen, "blue", "word")  # whoever it is that asks
    assert service.turns.bytes == 0


async def test_an_org_is_forgotten_when_it_is_asked_for(qwen: PromptTokenizer) -> None:
    service = TokenService()
    chat = Chat(conversation(9, 300))
    red = await service.chat(qwen, "red", chat)
    await service.chat(qwen, "blue", chat)
    service.turns.forget("red")
    assert service.turns.size_of("red") == 0
    assert service.turns.size_of("blue") == service.turns.bytes > 0
    assert red is not None
    assert red.prompt(KEYS).keys == KEYS.prompt(red.ids).keys  # of one that is still being served
    assert service.turns.size_of("red") == 0


async def test_what_was_asked_before_a_purge_is_not_kept_after_it(qwen: PromptTokenizer) -> None:
    service = TokenService()
    asking = asyncio.ensure_future(service.chat(qwen, "red", Chat(conversation(9, 3000))))
    await asyncio.sleep(0)  # it is tokenized in a thread
    service.turns.forget("red")
    tokens = await asking
    assert tokens is not None
    assert service.turns.bytes == 0


def test_what_is_dropped_while_more_is_tokenized_is_not_kept_with_it() -> None:
    turns, place = Turns(idle_seconds=60), Place("red", 1)
    before, raw = b"x" * PIECE_BYTES_MIN, b"<" + b"y" * PIECE_BYTES_MIN
    whole = before + raw + b"<"

    def add(found: Found, now: float) -> Tokens:
        pieces = cut(whole, [b"<"], found.end)
        new = [array("I", [number]) for number, _ in enumerate(pieces)]
        return turns.add(place, whole, found, pieces, new, now, turns.forgotten)

    add(turns.begin(place, whole, [b"<"]), 0.0)
    found = turns.begin(place, whole, [b"<"])
    assert found.end == len(whole) - 1
    turns.sweep(61.0, place)
    assert turns.bytes == 0
    tokens = add(found, 61.0)
    assert [*tokens.ids] == [0, 1, 0]
    assert turns.bytes == 0


CUTS = (b"<",)
PIECES = [b"<" + bytes([letter]) * (PIECE_BYTES_MIN + letter - 97) for letter in b"abc"]


def _tokenized(piece: bytes) -> array[int]:
    """Other pieces have other tokens, and not all as many."""
    return array("I", [*piece[: len(piece) // 3]])


class _Asking:
    """A request for a text, up to where its tokens are made elsewhere."""

    def __init__(self, turns: Turns, text: bytes) -> None:
        self.turns, self.text, self.forgotten = turns, text, turns.forgotten
        begun = turns.begin(PLACE, text, CUTS)
        pieces = cut(text, CUTS, begun.end)
        self.found = turns.find(PLACE, begun, pieces)
        self.left = [one for one in pieces if one.start >= self.found.end]

    def end(self, now: float) -> _Asking:
        new = [_tokenized(self.text[one.start : one.end]) for one in self.left]
        tokens = self.turns.add(PLACE, self.text, self.found, self.left, new, now, self.forgotten)
        self.tokens = tokens
        self.check()
        return self

    def check(self) -> None:
        """All is as it would be if nothing had been kept, for all makers of keys."""
        pieces = cut(self.text, CUTS)
        whole = [its for one in pieces for its in _tokenized(self.text[one.start : one.end])]
        assert [*self.tokens.ids] == whole
        for keys in (KEYS, WIDE, OTHER):
            assert self.tokens.prompt(keys).keys == keys.prompt(whole).keys


PLACE = Place("red", 1)
numbers = st.lists(st.sampled_from(range(len(PIECES))), max_size=9)


@given(
    st.lists(st.tuples(numbers, st.integers(0, 3), st.sampled_from([b"<", b"<a", b""])), max_size=20),
    st.sampled_from([1_500, 6_000, 1 << 20]),
    st.sampled_from([600, 1 << 16]),
)
@settings(deadline=None)
def test_requests_that_overtake_each_other_keep_what_is_so(
    asked: list[tuple[list[int], int, bytes]], bytes_max: int, run_bytes_max: int
) -> None:
    """Whatever is split, made longer or dropped while a request's tokens are made."""
    turns = Turns(bytes_max, idle_seconds=9)
    under_way, ended = list[_Asking](), list[_Asking]()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kept, "RUN_BYTES_MAX", run_bytes_max)
        for now, (which, waiting, end) in enumerate(asked):
            under_way.append(_Asking(turns, b"".join(PIECES[one] for one in which) + end))
            while len(under_way) > waiting:
                ended.append(under_way.pop(now % len(under_way)).end(float(now)))
                assert turns.bytes == turns.size_of("red") <= bytes_max
        ended += [one.end(float(len(asked))) for one in under_way]
        for one in ended:
            one.check()
        turns.sweep_all(1e6)  # which drops nothing that has something below it
        assert turns.bytes == 0


def test_a_conversation_that_goes_on_is_one_run_until_another_parts_from_it() -> None:
    turns = Turns()
    for turn in range(1, 6):
        _Asking(turns, b"".join(PIECES[at % 3] for at in range(turn)) + b"<").end(float(turn))
    [tree] = turns._trees.values()
    assert len(tree.order) == 1
    _Asking(turns, PIECES[0] + PIECES[1] + PIECES[1] + b"<").end(6.0)
    assert [len(run.ends) for run in tree.order] == [3, 1, 2]
    asking = _Asking(turns, b"".join(PIECES[at % 3] for at in range(5)) + b"<")
    assert len(asking.left) == 1  # all of the first one is there still


def test_who_parts_from_a_run_that_is_split_meanwhile_is_kept_where_it_parts() -> None:
    turns, (a, b, c) = Turns(), PIECES
    _Asking(turns, a + b + c + b"<").end(0.0)
    sooner, later = _Asking(turns, a + b + b + b"<"), _Asking(turns, a + c + b"<")
    for one in (sooner.end(1.0), later.end(2.0)):
        assert len(_Asking(turns, one.text).left) == 1


def test_requests_that_go_on_with_one_conversation_at_once_are_all_kept() -> None:
    turns, (a, b, c) = Turns(), PIECES
    _Asking(turns, a + b"<").end(0.0)
    texts = [a + b + b"<", a + c + b"<", a + b + c + b"<"]
    under_way = [_Asking(turns, text) for text in texts]
    for one in under_way:
        one.end(1.0)
    assert [len(_Asking(turns, text).left) for text in texts] == [1, 1, 1]


def test_who_parts_from_a_long_text_has_little_of_it_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run is copied where it is split: 30 ms for a text of 28 MB, for each short one that begins like
    it."""
    monkeypatch.setattr(kept, "RUN_BYTES_MAX", 1_000)
    turns, text = Turns(), b"".join(PIECES) * 20 + b"<"
    _Asking(turns, text).end(0.0)
    [tree] = turns._trees.values()
    assert max(len(run.text) for run in tree.order) <= 1_000 + PIECE_BYTES_MIN + 3
    assert len(_Asking(turns, text).left) == 1


def test_what_a_prompt_had_is_its_own_when_its_conversation_goes_on() -> None:
    turns, (a, b, c) = Turns(), PIECES
    first = _Asking(turns, a + b"<").end(0.0)
    _Asking(turns, a + b + c + b"<").end(1.0)
    first.check()


async def test_an_org_with_much_work_waits_for_itself() -> None:
    lanes = Lanes(1)
    begun: list[str] = []
    works = [
        lanes.run(org, partial(begun.append, name))
        for org, name in [("red", "r1"), ("red", "r2"), ("red", "r3"), ("blue", "b1")]
    ]
    await asyncio.gather(*works)
    assert begun == ["r1", "b1", "r2", "r3"] or begun == ["r1", "r2", "b1", "r3"]
    assert begun.index("b1") < begun.index("r3")


async def test_work_that_nobody_waits_for_is_not_begun() -> None:
    lanes = Lanes(1)
    gate = asyncio.Event()
    loop = asyncio.get_running_loop()
    held = asyncio.ensure_future(
        lanes.run("red", lambda: asyncio.run_coroutine_threadsafe(gate.wait(), loop).result())
    )
    begun: list[int] = []
    left = asyncio.ensure_future(lanes.run("red", lambda: begun.append(1)))
    await asyncio.sleep(0)
    left.cancel()
    gate.set()
    await held
    assert await lanes.run("red", lambda: 5) == 5
    assert begun == []
    with pytest.raises(ZeroDivisionError):
        await lanes.run("red", lambda: 1 // 0)
