"""Templates are programs of strangers: bounded in steps, time and text, and away from attributes."""

from __future__ import annotations

import threading
import tracemalloc

import pytest

from inference_brain.tokens.budget import Budget
from inference_brain.tokens.errors import BadTemplate, TemplateRefused, TemplateTooCostly
from inference_brain.tokens.sandbox import TEMPLATE_CHARACTERS_MAX, Template

BOMBS = {
    "loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "loops with a filter": "{% for a in range(99999) %}{% for b in range(99999) if b < 0 %}x"
    "{% endfor %}{% endfor %}",
    "a range": "{{ range(10 ** 9) | list }}",
    "a macro": "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
    "two calls in a macro": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}"
    "{% endmacro %}{{ f(60) }}",
    "a recursive loop": "{% for a in [[1]] recursive %}{{ loop([[1]]) }}{% endfor %}",
    "text of its own": "{% for a in range(9999) %}" + "x" * 1000 + "{% endfor %}",
    "doubling by +": "{% set n = namespace(s='x') %}{% for i in range(99) %}{% set n.s = n.s + n.s %}"
    "{% endfor %}",
    "doubling by ~": "{% set n = namespace(s='x') %}{% for i in range(99) %}{% set n.s = n.s ~ n.s %}"
    "{% endfor %}",
    "doubling a list": "{% set n = namespace(s=[1]) %}{% for i in range(99) %}{% set n.s = n.s + n.s %}"
    "{% endfor %}",
    "doubling in a block": "{% set n = namespace(s='x') %}{% for i in range(99) %}"
    "{% set b %}{{ n.s }}{{ n.s }}{% endset %}{% set n.s = b %}{% endfor %}",
    "times": "{{ 'x' * 10 ** 12 }}",
    "times of a list": "{{ ([1] * 10 ** 12) | length }}",
    "one string many times": "{{ (['x' * 10 ** 6] * 10 ** 6) | join }}",
    "one string many times, in JSON": "{{ (['x' * 10 ** 6] * 10 ** 6) | tojson }}",
    "one string many times, printed": "{{ ['x' * 10 ** 6] * 10 ** 6 }}",
    "one string many times, mapped": "{{ (['x' * 10 ** 6] * 10 ** 6) | map('upper') | join }}",
    "one string many times, by a method": "{{ ''.join(['x' * 10 ** 6] * 10 ** 6) }}",
    "a power": "{{ 10 ** (10 ** 8) }}",
    "a power of a power": "{{ (10 ** 1000) ** 10 }}",
    "a width": "{{ 'x' | center(10 ** 12) }}",
    "a width of a method": "{{ 'x'.ljust(10 ** 12) }}",
    "a width of %": "{{ '%1000000000000d' % 1 }}",
    "a computed width of %": "{{ '%*d' % (10 ** 12, 1) }}",
    "a width of % after flags": "{{ '%-010000d' % 1 }}",
    "a computed precision of %": "{{ '%.*f' % (10 ** 9, 1) }}",
    "a width of a name": "{{ '%(a(b))+10000d' % {'a(b)': 1} }}",
    "a computed width after a percent sign": "{{ '%%%*d' % (10 ** 12, 1) }}",
    "a width of format": "{{ '{:1000000000000}'.format(1) }}",
    "a computed width of format": "{{ '{:{}}'.format(1, 10 ** 12) }}",
    "a width of the filter format": "{{ '%1000000000000d' | format(1) }}",
    "an indent": "{{ 'x\ny' | indent(10 ** 12) }}",
    "an indent of JSON": "{{ [1] | tojson(indent=10 ** 12) }}",
    "slices": "{{ [1] | slice(10 ** 12) | list }}",
    "a batch": "{{ [1] | batch(10 ** 12, 'x') | list }}",
    "rounding": "{{ 5 | round(-10 ** 12) }}",
    "replacing": "{{ ('x' * 10 ** 7) | replace('x', 'y' * 10 ** 7) }}",
    "replacing by a method": "{{ ('x' * 10 ** 7).replace('x', 'y' * 10 ** 7) }}",
    "replacing nothing": "{{ ('x' * 10 ** 7).replace('', 'y' * 10 ** 7) }}",
    "many slices": "{% set s = 'x' * 10 ** 7 %}{% for i in range(99999) %}{% set t = s[i:] %}"
    "{% endfor %}",
    "many splits": "{% set s = 'x ' * 10 ** 6 %}{% for i in range(99999) %}{% set t = s.split() %}"
    "{% endfor %}",
    "output": "{% set s = 'x' * 10 ** 6 %}{% for i in range(99999) %}{{ s }}{% endfor %}",
}
# What would be made is more than 40 MB of what is far less, so that it has to be paid for before.
MANY = "(['X' * 10 ** 6] * 200)"
KEYS = "(('X' * 10 ** 6,) * 200)"
GROWING = {
    "adding in a row": "{% set s = 'x' * 10 ** 6 %}{{ " + " + ".join(["s"] * 100) + " }}",
    "a name of % many times": "{{ ('%(a)s' * 200) % {'a': 'x' * 10 ** 6} }}",
    "a name of the filter format": "{{ ('%(a)s' * 200) | format(a='x' * 10 ** 6) }}",
    "widths of %": "{{ ('%9000d' * 10 ** 4) % ((1,) * 10 ** 4) }}",
    "precisions of %": "{{ ('%.9000f' * 10 ** 4) % ((1,) * 10 ** 4) }}",
    "widths of names of %": "{{ ('%(a)9000d' * 10 ** 4) % {'a': 1} }}",
    "widths of the filter format": "{{ ('%(a)9000d' * 10 ** 4) | format(a=1) }}",
    "widths of format": "{{ ('{0:9000}' * 10 ** 4).format(1) }}",
    "a conversion of format": "{{ '{!r}'.format(" + MANY + ") }}",
    "replacing by names": "{{ ('x' * 200) | replace(old='x', new='y' * 10 ** 6) }}",
    "replacing by a name": "{{ ('x' * 200) | replace('x', new='y' * 10 ** 6) }}",
    "replacing a list": "{{ 'x' | replace(" + MANY + ", '') }}",
    "replacing a list by a method": "{{ 'x'.replace(" + MANY + ", '') }}",
    "joining by a list": "{{ [1] | join(" + MANY + ") }}",
    "joining fields": "{{ ([namespace(a='x' * 10 ** 6)] * 200) | join(attribute='a') }}",
    "joining characters": "{{ ('x' * 200) | join('y' * 10 ** 6) }}",
    "joining characters by a method": "{{ ('y' * 10 ** 6).join('x' * 200) }}",
    "separators of JSON": "{{ ([1] * 200) | tojson(separators=('y' * 10 ** 6, ':')) }}",
    "indents of lines": "{{ ('x\n' * 10 ** 4) | indent(10000) }}",
    "a text as an indent": "{{ ('x\n' * 200) | indent('y' * 10 ** 6) }}",
    "a text as an indent of JSON": "{{ ([1] * 200) | tojson(indent='y' * 10 ** 6) }}",
    "indents of JSON": "{% set n = namespace(a=[1] * 100) %}{% for i in range(60) %}"
    "{% set n.a = [n.a] %}{% endfor %}{{ n.a | tojson(indent=10000) }}",
    "a sum of lists": "{{ ([[1] * 10 ** 5] * 60) | sum(start=[]) | length }}",
    "namespaces": "{{ [namespace(a='x' * 10 ** 6)] * 200 }}",
    "values": "{{ [{'a': 'x' * 10 ** 6}.values()] * 200 }}",
    "items": "{{ ([{'a': 'x' * 10 ** 6}.items()] * 200) ~ '' }}",
    "text of a list": "{{ " + MANY + " | upper }}",
    "safe text of a list": "{{ " + MANY + " | safe }}",
    "a test of text": "{{ " + MANY + " is upper }}",
    "a reason to refuse": "{{ raise_exception(" + MANY + ") }}",
    "a key that is missing": "{{ {}[" + KEYS + "].x }}",
    "a place that is missing": "{{ [][" + MANY + "].x }}",
    "an attribute's name": "{{ '' | attr(" + MANY + ") }}",
    "an attribute's name by its own": "{{ '' | attr(name=" + MANY + ") }}",
    "a filter's name": "{{ [1] | map(" + KEYS + ") | list }}",
    "a test's name": "{{ [1] | select(" + KEYS + ") | list }}",
    "another test's name": "{{ [{'x': 1}] | rejectattr('x', " + KEYS + ") | list }}",
    "an item that is missing": "{{ [].index(" + MANY + ") }}",
    "escaping": "{{ ('' | safe).escape(" + MANY + ") }}",
    "sorting": "{{ " + MANY + " | sort | length }}",
    "sorting some": "{{ " + MANY + " | select('string') | sort | length }}",
}
ESCAPES = {
    "classes": "{{ ''.__class__.__mro__ }}",
    "classes by filter": "{{ ''|attr('__class__') }}",
    "globals": "{{ raise_exception.__globals__ }}",
    "format": "{{ '{0.__class__}'.format(1) }}",
    "format of a map": "{{ '{a.__class__}'.format_map({'a': 1}) }}",
    "the environment": "{{ self._TemplateReference__context.environment }}",
    "bytes": "{{ 'x'.encode() }}",
    "bytes of a number": "{{ (1).to_bytes(10 ** 9, 'big') }}",
    "changing messages": "{{ messages.append(1) }}",
    "changing a message": "{{ messages[0].update({'role': 'system'}) }}",
    "other templates": "{% include 'other' %}",
    "imports": "{% import 'os' as os %}",
    "lipsum": "{{ lipsum.__globals__ }}",
}


def budget() -> Budget:
    return Budget(characters=8 << 20, seconds=0.2, steps=200_000)


@pytest.mark.parametrize("name", BOMBS)
def test_bombs(name: str) -> None:
    template = Template(BOMBS[name])
    with pytest.raises((TemplateTooCostly, TemplateRefused)):
        template.render({}, budget())


@pytest.mark.parametrize("name", GROWING)
def test_what_grows_is_paid_for_before_it_is_made(name: str) -> None:
    template = Template(GROWING[name])
    tracemalloc.start()
    try:
        with pytest.raises(TemplateTooCostly):
            template.render({}, budget())
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 32 << 20


@pytest.mark.parametrize("name", ESCAPES)
def test_escapes(name: str) -> None:
    messages = [{"role": "user", "content": "x"}]
    try:
        text = Template(ESCAPES[name]).render({"messages": messages}, budget())
    except (BadTemplate, TemplateRefused):
        pass
    else:
        assert "class" not in text
        assert text == ""
    assert messages == [{"role": "user", "content": "x"}]


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ 'a' + 'b' ~ 1 ~ none }}", "ab1None"),
        ("{{ 'abc'[1:] }}{{ [1, 2, 3][::-1] }}{{ 'abc'[-1] }}", "bc[3, 2, 1]c"),
        ("{{ missing }}{{ missing is defined }}{{ [] | first }}", "False"),
        ("{{ '**%s** of 20240101' % 'a' }}{{ '* %s%%' | format(5) }}", "**a** of 20240101* 5%"),
        ("{{ '{:*^5}'.format('a') }}", "**a**"),
        ("{{ '%s-%05.2f' % ('a', 1.5) }}{{ '{:>4}'.format('x') }}", "a-01.50   x"),
        ("{{ {'b': '<é>', 'a': [1]} | tojson }}", '{"b": "<é>", "a": [1]}'),
        (
            "{{ {'b': 1, 'a': 'é'} | tojson(ensure_ascii=True, sort_keys=True) }}",
            r'{"a": "\u00e9", "b": 1}',
        ),
        ("{{ [1, 2] | tojson(separators=(',', ':')) }}", "[1,2]"),
        ("{{ [1, {'a': 2}] | tojson(separators=('-' * 8, '=')) }}", '[1--------{"a"=2}]'),
        ("{{ 'abc' | join('-') }}{{ '+'.join('abc') }}{{ [2].index(2) }}", "a-b-ca+b+c0"),
        ("{{ ['a', 'b'] | join(', ') }}{{ ', '.join(['a', 'b']) }}", "a, ba, b"),
        ("{{ [{'x': 1}, {'x': 2}] | map(attribute='x') | join('+') }}", "1+2"),
        ("{{ [1, 2] | sum }}{{ [[1], [2]] | sum(start=[]) }}{{ [{'x': 1}] | sum('x', 2) }}", "3[1, 2]3"),
        ("{{ 'a\nb' | indent }}{{ 'a\nb' | indent('--', true) }}", "a\n    b--a\n--b"),
        ("{{ [1, [2], {}] | tojson(indent=1) }}", "[\n 1,\n [\n  2\n ],\n {}\n]"),
        ("{{ 'aa' | replace(old='a', new='b') }}{{ 'aa' | replace('a', 'b', 1) }}", "bbba"),
        ("{{ '%(a)s%(a)s' % {'a': 1} }}{{ '%(a)s' | format(a=2) }}{{ '{!r}'.format('x') }}", "112'x'"),
        ("{{ 'A' is upper }}{{ ['b', 'A'] | select('string') | sort | list }}", "True['A', 'b']"),
        ("{{ [3, 1, 2] | sort | string }}{{ ('b', 'a') | unique | list }}", "[1, 2, 3]['b', 'a']"),
        ("{% for a in [1, 2, 3] %}{% if a == 2 %}{% continue %}{% endif %}{{ a }}{% endfor %}", "13"),
        ("{% for a in [1, 2, 3] %}{{ a }}{% if a == 2 %}{% break %}{% endif %}{% endfor %}", "12"),
        (
            "{% for a in [1, 2] %}{{ loop.index }}{{ loop.last }}{% else %}none{% endfor %}",
            "1False2True",
        ),
        ("{% for a in [] %}x{% else %}none{% endfor %}", "none"),
        ("{% generation %}a{% endgeneration %}\nb", "ab"),
        ("  {% if true %}\n  x\n  {% endif %}\n", "  x\n"),
        ("{% macro f(a, b=2) %}{{ a }}{{ b }}{% endmacro %}{{ f(1) }}{{ f(1, b=3) }}", "1213"),
        ("{% set n = namespace(a=1) %}{% set n.a = n.a + 1 %}{{ n.a }}", "2"),
        ("{{ 2 ** 10 }}{{ 7 * 6 }}{{ 7 % 4 }}{{ 1.5 * 2 }}", "10244233.0"),
        ("{{ 'a b' | title }}{{ 'x' | default('y') }}{{ 'ab' | replace('a', 'c') }}", "A Bxcb"),
        ("{{ {'a': 1}.items() | list }}{{ {'a': 1}.get('b', 'c') }}", "[('a', 1)]c"),
        ("{{ '<b>' | e }}{{ '<b>' | safe }}", "&lt;b&gt;<b>"),
        ("{{ ('<' | e) + '<' }}{{ [1] + [2] }}{{ 1 + 2 + 3 }}", "&lt;&lt;[1, 2]6"),
        ("{{ step is defined }}{{ add is defined }}{{ environment is defined }}", "FalseFalseFalse"),
    ],
)
def test_what_templates_do(source: str, text: str) -> None:
    assert Template(source).render({}) == text


@pytest.mark.parametrize(
    "source", ["{{ cycler() }}", "{{ 'xyz' | truncate(1, end='....', leeway=0) }}", "{{ 1e400 }}"]
)
def test_what_jinja_fails_at_is_refused(source: str) -> None:
    with pytest.raises(TemplateRefused, match="can't render these messages"):
        Template(source).render({})


def test_nothing_is_computed_while_a_template_is_read() -> None:
    Template("{{ 'x' | center(10 ** 9) }}{{ 'x' ~ 'y' * 10 ** 9 }}{{ ([1] | slice(10 ** 9) | list) }}")


def test_a_template_that_is_too_long() -> None:
    with pytest.raises(BadTemplate, match="characters"):
        Template("x" * (TEMPLATE_CHARACTERS_MAX + 1))


def test_a_template_that_is_nested_too_deep() -> None:
    with pytest.raises(BadTemplate):
        Template("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}")


def test_what_is_left_is_each_rendering_s_own() -> None:
    template = Template("{% for a in range(90000) %}{% endfor %}done")
    for _ in range(3):
        assert template.render({}, Budget(steps=100_000)) == "done"


@pytest.mark.parametrize("name", ["trim", "upper", "string", "list", "indent(0)"])
def test_a_filter_is_a_step_and_paid_for_by_what_it_is_given_and_what_it_makes(name: str) -> None:
    left = Budget(characters=10_000, steps=100)
    Template("{% set made = text | " + name + " %}").render({"text": "x" * 1000}, left)
    assert left.steps == 99
    assert left.characters <= 8_000


def test_threads_have_budgets_of_their_own() -> None:
    template = Template("{% for a in range(50000) %}{% endfor %}done")
    made: list[str] = []

    def render(steps: int) -> None:
        try:
            made.append(template.render({}, Budget(steps=steps)))
        except TemplateTooCostly:
            made.append("too costly")

    threads = [threading.Thread(target=render, args=(steps,)) for steps in (100_000, 10_000)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(made) == ["done", "too costly"]


def test_a_long_conversation_is_no_bomb() -> None:
    template = Template("{% for m in messages %}{{ m.content.strip() + '\n' }}{% endfor %}")
    messages = [{"content": f" {'word ' * 200}"} for _ in range(1000)]
    assert len(template.render({"messages": messages})) == 1_000_000
