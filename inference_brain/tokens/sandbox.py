"""Renders chat templates as transformers does, within bounds.

A template is a program from a model's folder: it decides what is rendered, and nothing else. Jinja's
immutable sandbox keeps it away from attributes; here are bounds for its steps, its time and what it
makes, since one line of a template can ask for a billion characters:

- turns of loops, calls of macros and of methods are steps, and the clock is looked at now and then;
- strings are paid for where they grow: `+`, `*`, `%`, `~`, slices, filters, methods, and the output;
- widths and counts that filters and methods are given have a maximum.

What remains is one operation of Python at a time, such as a comparison of lists that a template nested
within each other on purpose: that takes as long as it takes.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from types import FunctionType
from typing import Any, Final, NoReturn

import jinja2
from jinja2 import Environment, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedFormatter
from jinja2.visitor import NodeTransformer

from inference_brain.tokens.budget import Budget
from inference_brain.tokens.errors import BadTemplate, TemplateRefused, TemplateTooCostly
from telemetry.decoder import excerpt

TEMPLATE_CHARACTERS_MAX: Final = 1 << 20
WIDTH_MAX: Final = 10_000
INTEGER_BITS_MAX: Final = 4096
_LONG_NUMBER: Final = re.compile(r"\d{5,}|\*")
# Of strings and integers: what makes much of little, and no chat template has a use for.
_UNSAFE_METHODS: Final = frozenset({"encode", "expandtabs", "maketrans", "to_bytes", "translate"})
_WITH_WIDTH: Final = frozenset({"center", "ljust", "rjust", "zfill"})
_DROPPED_FILTERS: Final = ("pprint", "striptags", "urlize", "wordwrap", "xmlattr")
_DROPPED_GLOBALS: Final = ("lipsum",)
_WIDTHS: Final = {  # of filters: the arguments that are counts
    "batch": ("linecount", 0),
    "center": ("width", 0),
    "indent": ("width", 0),
    "round": ("precision", 0),
    "slice": ("slices", 0),
}


class _Spent(threading.local):
    """The budget of the rendering that this thread is in."""

    budget: Budget | None = None


_spent = _Spent()


def _budget() -> Budget:
    # Parts of a template are evaluated while it is compiled, too.
    return _spent.budget or Budget()


class Template:
    """One compiled chat template. Threads may render it at the same time."""

    __slots__ = ("_compiled", "source", "tree")

    def __init__(self, source: str) -> None:
        """Raises BadTemplate."""
        if len(source) > TEMPLATE_CHARACTERS_MAX:
            raise BadTemplate(f"The chat template has more than {TEMPLATE_CHARACTERS_MAX} characters")
        self.source = source
        try:
            self.tree = _environment().parse(source)
            self._compiled = _bounded_environment().from_string(source)
        except jinja2.TemplateError as error:
            raise BadTemplate(f"The chat template is no template: {excerpt(str(error))}") from error
        except RecursionError:
            raise BadTemplate("The chat template is nested too deep") from None

    def render(self, variables: Mapping[str, Any], budget: Budget | None = None) -> str:
        """Raises TemplateRefused for what the template does not accept, and TemplateTooCostly."""
        before, _spent.budget = _spent.budget, budget or Budget()
        try:
            return self._compiled.render(variables)
        except TemplateTooCostly:
            raise
        except jinja2.TemplateError as error:
            raise TemplateRefused(excerpt(str(error)) or "The chat template refused") from error
        except RecursionError:
            raise TemplateTooCostly("The chat template calls itself too often") from None
        except MemoryError:
            raise TemplateTooCostly("The chat template needs too much memory") from None
        # What a template does with messages of another form than it expects ends in any of Python's.
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise TemplateRefused(
                f"The chat template can't render these messages: {excerpt(str(error))}"
            ) from error
        finally:
            _spent.budget = before


class _Generation(Extension):
    """`{% generation %}`: what is in it is rendered; transformers can also tell where it was."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_render"), [], [], body).set_lineno(line)

    def _render(self, caller: Macro) -> str:
        return str(caller())


class _Bounds(NodeTransformer):
    """Makes loops and macros count their turns, and lets the environment do what makes strings."""

    def visit_For(self, node: nodes.For) -> nodes.For:  # noqa: N802  jinja2 names it
        self.generic_visit(node)
        node.body = [_step(node.lineno), *node.body]
        if node.test is not None:  # which is asked of items that the body never sees
            node.test = nodes.And(_ask("step", [], node.lineno), node.test).set_lineno(node.lineno)
        return node

    def visit_Macro(self, node: nodes.Macro) -> nodes.Macro:  # noqa: N802
        self.generic_visit(node)
        node.body = [_step(node.lineno), *node.body]
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Expr:  # noqa: N802
        self.generic_visit(node)
        return _ask("concatenate", node.nodes, node.lineno)

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Expr:  # noqa: N802
        self.generic_visit(node)
        if not isinstance(node.arg, nodes.Slice) or node.ctx != "load":
            return node
        none = nodes.Const(None)
        places = [node.arg.start or none, node.arg.stop or none, node.arg.step or none]
        return _ask("cut", [node.node, *places], node.lineno)


def _step(line: int) -> nodes.Node:
    return nodes.ExprStmt(_ask("step", [], line)).set_lineno(line)


def _ask(name: str, arguments: list[nodes.Expr], line: int) -> nodes.Expr:
    made = nodes.Call(nodes.EnvironmentAttribute(name), arguments, [], None, None)
    made.set_lineno(line)
    return made


class _Formatter(SandboxedFormatter):
    """Of `"{}".format(…)`: without long widths, and none that are computed."""

    def format_field(self, value: Any, spec: str) -> str:
        _check_width_of(spec)
        _budget().spend_on(value)
        return str(super().format_field(value, spec))


# What `_Bounds` puts into templates


def _count_step() -> bool:
    _budget().step()
    return True


def _concatenate(*parts: Any) -> str:
    budget = _budget()
    for one in parts:
        budget.spend_on(one)
    return "".join(map(str, parts))


def _cut(value: Any, start: Any, stop: Any, step: Any) -> Any:
    made = value[start:stop:step]
    _pay_for(_budget(), made)
    return made


class _Bounded(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"%", "*", "**", "+"})
    step = staticmethod(_count_step)
    concatenate = staticmethod(_concatenate)
    cut = staticmethod(_cut)
    _ours: frozenset[object] = frozenset({_count_step, _concatenate, _cut})

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        return _Bounds().visit(tree)  # type: ignore[no-any-return]

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        return attr not in _UNSAFE_METHODS and super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None
        text: str = value.__self__
        maps = value.__name__ == "format_map"

        def bounded(*args: Any, **kwargs: Any) -> str:
            named: Mapping[str, Any] = args[0] if maps and len(args) == 1 else kwargs
            return _Formatter(self).vformat(str(text), () if maps else args, named)

        return bounded

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        if type(obj) is FunctionType and obj in self._ours:
            return obj(*args)
        budget = _budget()
        budget.step()
        of = getattr(obj, "__self__", None)
        if isinstance(of, str):
            budget.spend(len(of))
            if obj.__name__ == "join" and args and not isinstance(args[0], str):
                args = (list(args[0]),)
            _check_method(budget, obj.__name__, of, args)
        made = super().call(context, obj, *args, **kwargs)
        _pay_for(budget, made)
        return made

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        budget = _budget()
        if operator == "+":
            made = left + right
            _pay_for(budget, made)
            return made
        if operator == "%":
            if isinstance(left, str):
                _check_width_of(left)
                budget.spend_on(right)
            return super().call_binop(context, operator, left, right)
        _check_product(budget, operator, left, right)
        return super().call_binop(context, operator, left, right)


def _pay_for(budget: Budget, made: object) -> None:
    if isinstance(made, str | list | tuple | dict):
        budget.spend(len(made))


def _check_method(budget: Budget, name: str, text: str, arguments: Sequence[Any]) -> None:
    """Before a method of a string is called."""
    if name in _WITH_WIDTH and arguments:
        _check_width(arguments[0])
    elif name == "replace" and len(arguments) >= 2:
        _pay_for_replacing(budget, text, arguments[0], arguments[1])
    elif name == "join" and arguments:
        _pay_for_joining(budget, text, arguments[0])


def _pay_for_replacing(budget: Budget, text: str, old: Any, new: Any) -> None:
    times = text.count(str(old))
    budget.spend(len(text) + times * len(str(new)))


def _pay_for_joining(budget: Budget, between: str, parts: Any) -> None:
    if isinstance(parts, list | tuple):
        budget.spend(len(between) * len(parts))
        budget.spend_on(parts)


def _check_product(budget: Budget, operator: str, left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int):
        bits = abs(left).bit_length()
        made = bits + abs(right).bit_length() if operator == "*" else bits * abs(right)
        if made > INTEGER_BITS_MAX:
            raise TemplateTooCostly("The chat template computes too large a number")
    elif operator == "*":
        for one, times in ((left, right), (right, left)):
            if isinstance(one, str | list | tuple) and isinstance(times, int):
                budget.spend(len(one) * max(times, 0))


def _check_width(value: Any) -> None:
    if isinstance(value, int | float) and abs(value) > WIDTH_MAX:
        raise TemplateTooCostly(f"The chat template asks for a width or count above {WIDTH_MAX}")


def _check_width_of(form: str) -> None:
    if _LONG_NUMBER.search(form):
        raise TemplateTooCostly(f"The chat template asks for a width above {WIDTH_MAX}")


@jinja2.pass_context  # so that nothing is evaluated while the template is compiled
def _finalize(_: Context, value: Any) -> Any:
    """What an expression puts out."""
    budget = _budget()
    if isinstance(value, str):
        budget.spend(len(value))
        return value
    budget.spend_on(value)
    return str(value)


def _bounded_filter(name: str, made_by: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that pays for what it is given and what it makes."""
    takes = getattr(made_by, "jinja_pass_arg", None)
    first = 1 if takes else 0

    def bounded(*args: Any, **kwargs: Any) -> Any:
        budget = _budget()
        budget.step()
        value = args[first] if len(args) > first else None
        rest = args[first + 1 :]
        if isinstance(value, str | list | tuple | dict):
            budget.spend(len(value))
        if name in _WIDTHS:
            keyword, place = _WIDTHS[name]
            _check_width(kwargs.get(keyword, rest[place] if len(rest) > place else 0))
        elif name == "join" and not isinstance(value, str):
            value = list(value or ())  # a generator would be empty once it was looked at
            args = (*args[:first], value, *rest)
            _pay_for_joining(budget, str(kwargs.get("d", rest[0] if rest else "")), value)
        elif name == "replace" and len(rest) >= 2:
            _pay_for_replacing(budget, str(value), rest[0], rest[1])
        elif name == "format":
            _check_width_of(str(value))
            budget.spend_on(rest)
            budget.spend_on(kwargs)
        elif name == "string":
            budget.spend_on(value)
        made = made_by(*args, **kwargs)
        _pay_for(budget, made)
        return made

    if takes is not None:
        bounded.jinja_pass_arg = takes  # type: ignore[attr-defined]
    return bounded


def _to_json(
    value: Any,
    ensure_ascii: bool = False,  # noqa: FBT001  as templates call it
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,  # noqa: FBT001
) -> str:
    """As transformers has it: without escaping what HTML would want escaped."""
    _check_width(indent)
    _budget().spend_on(value)
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _now(form: str) -> str:
    """Of this machine's clock and zone, as an engine would say it."""
    _budget().spend(64 * len(form))
    return datetime.now().strftime(form)  # noqa: DTZ005


def _environment() -> Environment:
    """As transformers makes it."""
    return ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )


def _bounded_environment() -> Environment:
    made = _Bounded(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_Generation, loopcontrols],
        optimized=False,
        finalize=_finalize,
    )
    for name in _DROPPED_FILTERS:
        del made.filters[name]
    for name in _DROPPED_GLOBALS:
        del made.globals[name]
    made.filters["tojson"] = _to_json
    made.filters = {name: _bounded_filter(name, one) for name, one in made.filters.items()}
    made.globals["raise_exception"] = _raise
    made.globals["strftime_now"] = _now
    return made
