"""Pages as tests compare them: without the white space that no browser shows."""

from __future__ import annotations

import re
from typing import Any

BLOCKS = (
    "section|header|form|ul|ol|li|dl|dt|dd|table|thead|tbody|tr|th|td|p|div|h1|h2|h3|nav|details|summary"
)


def compact(answer: Any) -> str:
    """The HTML of a response on one line, without blanks next to the tags of blocks."""
    text = " ".join(answer.content.decode().split())
    text = re.sub(rf" ?(</?(?:{BLOCKS})\b[^<>]*>) ?", r"\1", text)
    text = re.sub(r"(<(?:a|button|span)\b[^<>]*>) ", r"\1", text)
    return re.sub(r" (</(?:a|button|span)>)", r"\1", text)
