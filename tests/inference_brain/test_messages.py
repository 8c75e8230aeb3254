"""Messages reach templates in the form in which vLLM hands them on."""

from __future__ import annotations

from typing import Any

import pytest

from inference_brain.tokens.content_format import content_format
from inference_brain.tokens.errors import BadMessages
from inference_brain.tokens.messages import Chat, has_media, prepare, prepare_tools
from inference_brain.tokens.sandbox import Template

USER = {"role": "user", "content": "x"}


def one(message: dict[str, Any], form: Any = "string") -> dict[str, Any]:
    return prepare([message], form, has_developer=True)[0]


def test_contents_are_one_string_or_parts_as_the_template_wants_it() -> None:
    parts = [{"type": "text", "text": "a"}, "b", {"type": "input_text", "text": "c", "more": 1}]
    message = {"role": "user", "content": parts}
    assert one(message)["content"] == "a\nb\nc"
    assert one(message, "openai")["content"] == [
        {"type": "text", "text": "a"},
        {"type": "text", "text": "b"},
        {"type": "text", "text": "c", "more": 1},
    ]
    assert one(USER, "openai")["content"] == [{"type": "text", "text": "x"}]
    assert one({"role": "assistant"})["content"] == ""
    assert one({"role": "assistant"}, "openai")["content"] == []


def test_results_of_tools_are_strings() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    message = {"role": "tool", "tool_call_id": "1", "content": parts}
    assert one(message, "openai") == {"role": "tool", "content": "a\nb", "tool_call_id": "1"}


@pytest.mark.parametrize(
    ("arguments", "made"),
    [
        ('{"a": [1, 2.5, null]}', {"a": [1, 2.5, None]}),
        ({"a": 1}, {"a": 1}),
        ("", {}),
        (None, {}),
        ("[1]", {}),
        ("{nonsense", {}),
        ("[" * 5000, {}),
        (5, {}),
    ],
)
def test_arguments_of_calls_are_objects(arguments: object, made: dict[str, Any]) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    prepared = one({"role": "assistant", "tool_calls": [call]})
    assert prepared["tool_calls"][0]["function"] == {"name": "f", "arguments": made}
    assert list(prepared["tool_calls"][0]) == ["id", "function", "type"]
    assert list(prepared["tool_calls"][0]["function"]) == ["arguments", "name"]
    assert call["function"] == {"name": "f", "arguments": arguments}  # what came is as it was


def test_what_else_messages_have() -> None:
    assert one({**USER, "name": "John", "tool_calls": [1], "foo": 1}) == {**USER, "name": "John"}
    thought = one({"role": "assistant", "content": "x", "reasoning": "y", "tool_calls": []})
    assert thought == {
        "role": "assistant",
        "content": "x",
        "reasoning": "y",
        "reasoning_content": "y",
    }


def test_a_line_that_changes_with_each_request_is_left_out() -> None:
    line = "x-anthropic-billing-header: cch=12345;"
    assert one({"role": "system", "content": f"{line}\nBe brief."})["content"] == "Be brief."
    assert one({"role": "system", "content": line})["content"] == ""
    assert one({"role": "user", "content": line})["content"] == line


def test_developers_are_the_system_where_the_template_does_not_know_them() -> None:
    developer, system = {"role": "developer", "content": "d"}, {"role": "system", "content": "s"}
    made = prepare([USER, developer, system], "string", has_developer=False)
    assert made == [{"role": "system", "content": "d\n\ns"}, USER]
    made = prepare([developer, USER], "openai", has_developer=False)
    assert made[0] == {"role": "system", "content": [{"type": "text", "text": "d"}]}
    made = prepare([developer, USER], "string", has_developer=True)
    assert made[0] == {**developer, "tools": None}
    made = prepare([USER, system], "string", has_developer=False)  # nobody asked for it
    assert made == [USER, system]


def test_tools_have_the_fields_that_templates_print() -> None:
    tool = {"function": {"parameters": {"b": 1, "a": 2}, "name": "f", "other": 1}, "type": "function"}
    made = prepare_tools([tool])
    assert made is not None
    assert list(made[0]) == ["type", "function"]
    assert list(made[0]["function"].items()) == [
        ("name", "f"),
        ("description", None),
        ("parameters", {"b": 1, "a": 2}),
    ]
    strict = prepare_tools([{"type": "function", "function": {"name": "f", "strict": True}}])
    assert strict is not None
    assert strict[0]["function"]["strict"] is True
    assert prepare_tools(None) is None


@pytest.mark.parametrize(
    "message",
    [
        {"content": "x"},
        {"role": "user", "content": 5},
        {"role": "user", "content": [5]},
        {"role": "user", "content": [{"text": "x"}]},
        {"role": "user", "content": [{"type": "text", "text": 5}]},
        {"role": "user", "content": [{"type": "other"}]},
        {"role": "assistant", "tool_calls": "x"},
        {"role": "assistant", "tool_calls": [5]},
        {"role": "assistant", "tool_calls": [{"type": "custom", "function": {}}]},
    ],
)
def test_what_is_no_message(message: dict[str, Any]) -> None:
    with pytest.raises(BadMessages):
        one(message)


def test_no_message_at_all() -> None:
    with pytest.raises(BadMessages, match="at least one message"):
        prepare([], "string", has_developer=True)


def test_images_are_found() -> None:
    assert not has_media([USER, {"role": "user", "content": [{"type": "text", "text": "x"}, "y"]}])
    assert has_media([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}])
    assert has_media([{"role": "user", "content": [{"image_url": "x"}]}])


def test_names_that_a_template_s_variables_may_not_have() -> None:
    with pytest.raises(BadMessages, match="may not have messages, tokenize"):
        Chat([USER], template_kwargs={"tokenize": True, "messages": []}).variables()
    variables = Chat([USER], reasoning_effort="none").variables()
    assert variables["enable_thinking"] is False
    variables = Chat([USER], reasoning_effort="low", template_kwargs={"enable_thinking": 1}).variables()
    assert variables["enable_thinking"] == 1


MACRO = "{% macro f(x) %}{% for c in x %}{% endfor %}{% endmacro %}"
OF_CONTENT = "{% macro f(content) %}{% for c in content %}{% endfor %}{% endmacro %}"


@pytest.mark.parametrize(
    ("source", "form"),
    [
        ("{% for m in messages %}{{ m.content }}{% endfor %}", "string"),
        (
            "{% for m in messages %}{% for c in m.content %}{{ c.text }}{% endfor %}{% endfor %}",
            "openai",
        ),
        (
            "{% for m in messages[1:] %}{% for c in m['content'] | list %}{% endfor %}{% endfor %}",
            "openai",
        ),
        (
            "{% set ms = messages %}{% for m in ms %}{% for c in m.content %}{% endfor %}{% endfor %}",
            "openai",
        ),
        ("{% for content in messages %}{% for c in content %}{% endfor %}{% endfor %}", "openai"),
        (MACRO + "{% for m in messages %}{{ f(m.content) }}{% endfor %}", "openai"),
        (MACRO + "{% for m in messages %}{{ f(x=m['content']) }}{% endfor %}", "openai"),
        (OF_CONTENT + "{% for m in messages %}{{ f(m.role) }}{% endfor %}", "string"),
        ("{% for m in messages %}{% for c in m.tool_calls %}{% endfor %}{% endfor %}", "string"),
        ("{% for k, m in messages %}{% for c in m.content %}{% endfor %}{% endfor %}", "string"),
        ("{{ messages }}", "string"),
    ],
)
def test_which_form_a_template_wants(source: str, form: str) -> None:
    assert content_format(Template(source).tree) == form
