"""Small tokenizers of the shapes that model families use, made of the same words each time.

Nothing is trained: pieces are the beginnings of words, so that a tokenizer is the same with every
version of the library, and what it makes of a text can be written down.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

_WORDS: Final = (
    "the of and to in is you that it was for on are as with his they at be this have from or "
    "one had by word but not what all were we when your can said there use an each which she do "
    "how their if will up other about out many then them these so some her would make like him "
    "into time has look two more write go see number no way could people my than first water "
    "been call who oil its now find long down day did get come made may part function name "
    "arguments parameters string type object user assistant system tool weather city Berlin "
    "Paris temperature answer question think reason content message role today "
)
WORDS: Final = _WORDS.split()
MARK: Final = "▁"
_GPT4: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)


def special(*texts: str, **flags: bool) -> list[AddedToken]:
    return [AddedToken(text, special=True, normalized=False, **flags) for text in texts]


def wide(name: str) -> str:
    """A token between wide bars."""
    bar = "\N{FULLWIDTH VERTICAL LINE}"
    return f"<{bar}{name}{bar}>"


def _pieces(words: Iterable[str], alphabet: Sequence[str]) -> models.BPE:
    """Merges that make each of the words from its left to its right."""
    vocabulary = dict.fromkeys(alphabet)
    merges: dict[tuple[str, str], None] = {}
    for word in words:
        for end in range(2, len(word) + 1):
            merges[word[: end - 1], word[end - 1]] = None
            vocabulary[word[:end]] = None
    numbers = {text: number for number, text in enumerate(vocabulary)}
    return models.BPE(vocab=numbers, merges=list(merges))


def _byte_level(pattern: str | None) -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*WORDS, *(f"Ġ{word}" for word in WORDS), "ĊĊ", "ĠĠ"]
    made = Tokenizer(_pieces(words, alphabet))
    if pattern is None:
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    else:
        made.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(pattern), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    made.decoder = decoders.ByteLevel()
    return made


def _sentence_piece(more: Sequence[str] = ()) -> Tokenizer:
    """Byte-fallback BPE over texts whose blanks are marks."""
    alphabet = ["<unk>", *(f"<0x{one:02X}>" for one in range(256)), MARK, "\n", "é", "ü"]
    letters = sorted(
        {letter for word in WORDS for letter in word} | set("0123456789.,:;!?<>|/[]{}\"'_-#")
    )
    words = [*(f"{MARK}{word}" for word in WORDS), *WORDS, MARK * 2, MARK * 4, *more]
    model = _pieces(words, [*alphabet, *letters])
    model.unk_token = "<unk>"
    model.byte_fallback = True
    model.fuse_unk = True
    made = Tokenizer(model)
    made.decoder = decoders.Sequence(
        [decoders.Replace(MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return made


def llama3() -> Tokenizer:
    made = _byte_level(_GPT4)
    names = ("begin_of_text", "end_of_text", "start_header_id", "end_header_id", "eom_id", "eot_id")
    made.add_tokens(special(*(f"<|{name}|>" for name in names)))
    bos = "<|begin_of_text|>"
    made.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(
                single=f"{bos} $A",
                pair=f"{bos} $A {bos}:1 $B:1",
                special_tokens=[(bos, made.token_to_id(bos))],
            ),
        ]
    )
    return made


def qwen() -> Tokenizer:
    """Normalizes; some of its tokens are not special."""
    made = _byte_level(_GPT4)
    made.normalizer = normalizers.NFC()
    made.add_tokens(special("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision|>"))
    plain = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
    made.add_tokens([AddedToken(text, normalized=False) for text in plain])
    made.post_processor = processors.ByteLevel(trim_offsets=False)
    return made


def gpt2() -> Tokenizer:
    """Without anything around a byte-level BPE; roles are written in plain text."""
    made = _byte_level(None)
    made.add_tokens(special("<|endoftext|>", "<|im_start|>", "<|im_end|>"))
    return made


def deepseek() -> Tokenizer:
    """Its tokens are found after normalizing, which changes nothing."""
    made = _byte_level(_GPT4)
    made.normalizer = normalizers.Sequence([])
    texts = ("User", "Assistant", "tool▁calls▁begin", "tool▁calls▁end", "tool▁sep")
    outer = ("begin▁of▁sentence", "end▁of▁sentence", "tool▁outputs▁begin", "tool▁outputs▁end")
    made.add_tokens([AddedToken(wide(text), normalized=True, special=True) for text in outer])
    made.add_tokens([AddedToken(wide(text), normalized=True) for text in texts])
    made.add_tokens([AddedToken("<think>", normalized=True), AddedToken("</think>", normalized=True)])
    return made


def llama2() -> Tokenizer:
    """A mark before each piece of text, by its normalizer."""
    made = _sentence_piece()
    made.normalizer = normalizers.Sequence([normalizers.Prepend(MARK), normalizers.Replace(" ", MARK)])
    made.add_tokens(special("<unk>", "<s>", "</s>"))
    made.add_tokens([AddedToken("<|user|>"), AddedToken("<|assistant|>"), AddedToken("<|system|>")])
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s>:1 $B:1", special_tokens=[("<s>", made.token_to_id("<s>"))]
    )
    return made


def mistral() -> Tokenizer:
    """A mark at the beginning of the text only."""
    made = _sentence_piece()
    made.pre_tokenizer = pre_tokenizers.Metaspace(MARK, prepend_scheme="first", split=False)
    names = ("INST", "/INST", "TOOL_CALLS", "AVAILABLE_TOOLS", "/AVAILABLE_TOOLS", "TOOL_RESULTS")
    made.add_tokens(special("<unk>", "<s>", "</s>"))
    made.add_tokens(special(*(f"[{name}]" for name in names), "[/TOOL_RESULTS]"))
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s>:1 $B:1", special_tokens=[("<s>", made.token_to_id("<s>"))]
    )
    return made


def gemma() -> Tokenizer:
    """Runs of line ends and of marks are tokens, and HTML is."""
    made = _sentence_piece()
    made.normalizer = normalizers.Replace(" ", MARK)
    made.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    made.add_tokens(special("<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>"))
    runs = ["\n" * size for size in range(2, 5)] + [MARK * size for size in range(2, 5)]
    html = ["<table>", "</table>", "<b>", "</b>"]
    made.add_tokens([AddedToken(text, normalized=False) for text in (*runs, *html)])
    made.post_processor = processors.TemplateProcessing(
        single="<bos> $A",
        pair="<bos> $A <bos>:1 $B:1",
        special_tokens=[("<bos>", made.token_to_id("<bos>"))],
    )
    return made


def phi3() -> Tokenizer:
    """Its tokens take the blanks after them."""
    made = _sentence_piece()
    made.normalizer = normalizers.Sequence([normalizers.Prepend(MARK), normalizers.Replace(" ", MARK)])
    names = ("user", "system", "assistant", "end", "endoftext", "placeholder1")
    made.add_tokens(special("<unk>", "<s>"))
    made.add_tokens(special("</s>", rstrip=True))
    made.add_tokens(special(*(f"<|{name}|>" for name in names), rstrip=True))
    return made


def unigram() -> Tokenizer:
    """As T5's: marks before each piece of text, a token that takes the blanks before it."""
    letters = sorted({letter for word in WORDS for letter in word} | set("0123456789.,:!?<>|/\n"))
    pieces = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0), (MARK, -3.0)]
    pieces += [(f"{MARK}{word}", -4.0 - len(word) / 10) for word in dict.fromkeys(WORDS)]
    pieces += [(letter, -9.0) for letter in letters]
    made = Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=False))
    made.normalizer = normalizers.Sequence(
        [normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")]
    )
    made.pre_tokenizer = pre_tokenizers.Metaspace(MARK, prepend_scheme="always")
    made.decoder = decoders.Metaspace(MARK, prepend_scheme="always")
    made.add_tokens(special("<unk>", "<s>", "</s>", "<|user|>", "<|assistant|>", "<|system|>"))
    made.add_tokens(special("<mask>", lstrip=True))
    made.post_processor = processors.TemplateProcessing(
        single="$A </s>", pair="$A </s> $B:1 </s>:1", special_tokens=[("</s>", 2)]
    )
    return made


def awkward() -> Tokenizer:
    """All that makes cutting unsafe: tokens within tokens, of whole words, that are normalized, that
    take blanks, that are blanks, or overlap themselves."""
    made = _byte_level(_GPT4)
    made.normalizer = normalizers.Lowercase()
    made.add_tokens(special("<a>", "<a><b>", "<c>", "b><c", "<cut>", "xyx", "«", "  "))
    made.add_tokens(special("<word>", "word", single_word=True))
    made.add_tokens(special("<left>", lstrip=True))
    made.add_tokens(special("<right>", rstrip=True))
    made.add_tokens(special("<end>", "<start>"))
    made.add_tokens([AddedToken("<Normal>", normalized=True), AddedToken("Today", normalized=True)])
    return made


SHAPES: Final[dict[str, Callable[[], Tokenizer]]] = {
    "awkward": awkward,
    "deepseek": deepseek,
    "gemma": gemma,
    "gpt2": gpt2,
    "llama2": llama2,
    "llama3": llama3,
    "mistral": mistral,
    "phi3": phi3,
    "qwen": qwen,
    "unigram": unigram,
}
