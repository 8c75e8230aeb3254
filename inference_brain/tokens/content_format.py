"""Whether a template wants contents as strings or as lists of parts, found as vLLM finds it.

A template that goes through the parts of a message's content has a loop over it: over `content` of what
a loop over `messages` yields, over a variable named `content`, or over what a macro gets of it.
"""

from __future__ import annotations

from collections.abc import Iterator

from jinja2 import nodes

from inference_brain.tokens.messages import ContentFormat


def content_format(tree: nodes.Template) -> ContentFormat:
    return "openai" if any(True for _ in _loops_over_content(tree)) else "string"


def knows_developer(source: str) -> bool:
    return '"developer"' in source or "'developer'" in source


def _loops_over_content(tree: nodes.Template) -> Iterator[nodes.For]:
    messages = set(_message_names(tree))
    in_macros: dict[int, set[str]] = {}
    for macro in tree.find_all(nodes.Macro):
        given = set(_given_content(tree, macro, messages))
        for loop in macro.find_all(nodes.For):
            in_macros.setdefault(id(loop), set()).update(given)
    for loop in tree.find_all(nodes.For):
        if any(_leads_to(loop.iter, name, "content") for name in messages):
            yield loop
        elif isinstance(loop.iter, nodes.Name):
            given = in_macros.get(id(loop), {"content"} if id(loop) not in in_macros else set())
            if loop.iter.name in given:
                yield loop


def _given_content(tree: nodes.Template, macro: nodes.Macro, messages: set[str]) -> Iterator[str]:
    """The parameters of a macro that somewhere get the content of a message."""
    names = [one.name for one in macro.args]
    for call in tree.find_all(nodes.Call):
        if not isinstance(call.node, nodes.Name) or call.node.name != macro.name:
            continue
        given = [*zip(names, call.args, strict=False), *((one.key, one.value) for one in call.kwargs)]
        for name, value in given:
            if name in names and any(_leads_to(value, one, "content") for one in messages):
                yield name


def _message_names(tree: nodes.Template) -> Iterator[str]:
    """What loops over `messages`, or over another name of them, call one message."""
    lists = ["messages"]
    for name in lists:  # grows meanwhile
        for one in tree.find_all(nodes.Assign):
            if not isinstance(one.target, nodes.Name) or one.target.name in lists:
                continue
            if _leads_to(one.node, name):
                lists.append(one.target.name)
    for loop in tree.find_all(nodes.For):
        if isinstance(loop.target, nodes.Name) and any(_leads_to(loop.iter, one) for one in lists):
            yield loop.target.name


def _leads_to(node: nodes.Node | None, name: str, key: str | None = None) -> bool:
    """Whether an expression is the variable, or its field `key`: filtered, tested or cut as well."""
    if isinstance(node, nodes.Filter | nodes.Test):
        return _leads_to(node.node, name, key)
    if isinstance(node, nodes.Getitem):
        if isinstance(node.arg, nodes.Slice):
            return _leads_to(node.node, name, key)
        has_key = key is not None and isinstance(node.arg, nodes.Const) and node.arg.value == key
        return has_key and _is(node.node, name)
    if isinstance(node, nodes.Getattr):
        return node.attr == key and _is(node.node, name)
    return key is None and _is(node, name)


def _is(node: nodes.Node | None, name: str) -> bool:
    return isinstance(node, nodes.Name) and node.ctx == "load" and node.name == name
