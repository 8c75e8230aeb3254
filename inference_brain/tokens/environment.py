"""The environment that chat templates run in: transformers' own, with what bounds them put into it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from typing import Any, Final, NoReturn

import jinja2
from jinja2 import Environment, nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import make_attrgetter
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedFormatter
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from inference_brain.tokens.budget import ITEM_CHARACTERS, Budget, current
from inference_brain.tokens.growth import (
    check_method,
    check_product,
    check_width,
    pay_for,
    pay_for_formatting,
    pay_for_indenting,
    pay_for_joining,
    pay_for_replacing,
    pay_for_spec,
)

# Of strings and integers: what makes much of little, and no chat template has a use for.
_UNSAFE_METHODS: Final = frozenset({"encode", "expandtabs", "maketrans", "to_bytes", "translate"})
_OF_DICT: Final = frozenset(dir(dict))
_OF_STRINGS: Final = frozenset(
    one for one in dir(str) if one[0] != "_" and not one.startswith("format")
).difference(_UNSAFE_METHODS)
_OF_LOOPS: Final = frozenset({"first", "index", "index0", "last", "length", "revindex"})
_DROPPED_FILTERS: Final = ("pprint", "striptags", "urlize", "wordwrap", "xmlattr")
_DROPPED_GLOBALS: Final = ("lipsum",)
_WIDTHS: Final = {  # of filters: the arguments that are counts
    "batch": ("linecount", 0),
    "center": ("width", 0),
    "indent": ("width", 0),
    "round": ("precision", 0),
    "slice": ("slices", 0),
}
_CHECKED: Final = _WIDTHS.keys() | {"format", "join", "replace"}  # before they do anything
# Others make text of all that is in what they are given, or copy it.
_OF_ITEMS: Final = frozenset(
    (
        *("abs", "attr", "batch", "count", "d", "default", "first", "float", "int", "items", "join"),
        *("last", "length", "list", "map", "random", "reject", "rejectattr", "reverse", "round"),
        *("select", "selectattr", "slice", "sum", "tojson"),
    )
)
_SORTING: Final = frozenset({"groupby", "sort", "unique"})
# Of which arguments are names: of what is none they make text, to say so.
_OF_NAMES: Final = frozenset({"attr", "map", "reject", "rejectattr", "select", "selectattr"})


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

    def visit_Add(self, node: nodes.Add) -> nodes.Expr:  # noqa: N802
        """All that is added in a row at once: most of what templates write is put together so."""
        self.generic_visit(node)
        left = [node.left]
        if isinstance(first := node.left, nodes.Call) and isinstance(
            first.node, nodes.EnvironmentAttribute
        ):
            left = first.args if first.node.name == "add" else left
        return _ask("add", [*left, node.right], node.lineno)

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


class _Compiler(CodeGenerator):
    """Lets templates call what `_Bounds` puts into them without asking whether they may: no template can
    name it. Each rendering looks once which budget is its own; variables of templates have other names
    than `budget`."""

    def write_commons(self) -> None:
        super().write_commons()
        self.writeline("budget = environment.budget()")

    def _make_finalize(self) -> CodeGenerator._FinalizeInfo:
        """Nothing is evaluated while the template is compiled."""
        return self._FinalizeInfo(None, "environment.finalize(budget, ")

    def _output_const_repr(self, group: Iterable[Any]) -> str:
        """Text of the template itself is paid for, too: a loop may write it any number of times."""
        return f"environment.finalize(budget, {super()._output_const_repr(group)})"

    def visit_Call(  # noqa: N802
        self,
        node: nodes.Call,
        frame: Frame,
        forward_caller: bool = False,  # noqa: FBT001  as jinja2 has it
    ) -> None:
        if not isinstance(node.node, nodes.EnvironmentAttribute):
            super().visit_Call(node, frame, forward_caller=forward_caller)
            return
        self.visit(node.node, frame)
        self.write("(budget, ")
        for one in node.args:
            self.visit(one, frame)
            self.write(", ")
        self.write(")")


class _Formatter(SandboxedFormatter):
    """Of `"{}".format(…)`: without long widths, and none that are computed."""

    def convert_field(self, value: Any, conversion: Any) -> Any:
        if conversion:
            current().spend_on(value)
        return super().convert_field(value, conversion)

    def format_field(self, value: Any, spec: str) -> str:
        budget = current()
        pay_for_spec(budget, spec)
        budget.spend_on(value)
        return str(super().format_field(value, spec))


class Undefined(jinja2.Undefined):
    """Says what is missing once that is paid for: a template may ask for more than a name."""

    __slots__ = ()

    @property
    def _undefined_message(self) -> str:
        current().spend_on(self._undefined_name)
        return super()._undefined_message


# What `_Bounds` puts into templates


def _concatenate(budget: Budget, *parts: Any) -> str:
    for one in parts:
        budget.spend_on(one)
    return "".join(map(str, parts))


def _add(budget: Budget, *parts: Any) -> Any:
    characters = 0
    for one in parts:
        if type(one) is not str:
            break
        characters += len(one)
    else:
        budget.spend(characters)
        return "".join(parts)
    made = parts[0]
    for one in parts[1:]:
        made = made + one
        pay_for(budget, made)
    return made


def _cut(budget: Budget, value: Any, start: Any, stop: Any, step: Any) -> Any:
    made = value[start:stop:step]
    pay_for(budget, made)
    return made


class _Bounded(ImmutableSandboxedEnvironment):
    code_generator_class = _Compiler
    intercepted_binops = frozenset({"%", "*", "**"})
    budget = staticmethod(current)
    step = staticmethod(Budget.step)
    add = staticmethod(_add)
    concatenate = staticmethod(_concatenate)
    cut = staticmethod(_cut)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        return _Bounds().visit(tree)  # type: ignore[no-any-return]

    def getattr(self, obj: Any, attribute: str) -> Any:
        """As the sandbox has it, and without what it looks at where there is nothing to look at: most
        of a rendering is fields of messages and methods of their contents."""
        kind = type(obj)
        if kind is dict and attribute not in _OF_DICT:
            try:
                return obj[attribute]
            except KeyError:
                return self.undefined(obj=obj, name=attribute)
        if kind is str and attribute in _OF_STRINGS:
            return getattr(obj, attribute)
        if kind is LoopContext and attribute in _OF_LOOPS:
            return getattr(obj, attribute)
        if kind is Namespace and attribute[0] != "_":
            try:
                return getattr(obj, attribute)
            except AttributeError:
                return self.undefined(obj=obj, name=attribute)
        return super().getattr(obj, attribute)

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
        budget = current()
        budget.step()
        of = getattr(obj, "__self__", None)
        if isinstance(of, str):
            budget.spend(len(of))
            if obj.__name__ == "join" and args and not isinstance(args[0], str):
                args = (list(args[0]),)
            check_method(budget, obj.__name__, of, args)
        elif isinstance(
            of, list | type
        ):  # `[].index` names what is not there, `Markup.escape` makes text
            budget.spend_on(args)
        made = super().call(context, obj, *args, **kwargs)
        pay_for(budget, made)
        return made

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        budget = current()
        if operator == "%":
            if isinstance(left, str):
                pay_for_formatting(budget, left, right)
            return super().call_binop(context, operator, left, right)
        check_product(budget, operator, left, right)
        return super().call_binop(context, operator, left, right)


def _finalize(budget: Budget, value: Any) -> Any:
    """What an expression puts out."""
    if isinstance(value, str):
        budget.spend(len(value))
        return value
    budget.spend_on(value)
    return str(value)


def _bounded_filter(name: str, made_by: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that pays for what it is given and what it makes."""
    takes = getattr(made_by, "jinja_pass_arg", None)
    first = 1 if takes else 0
    is_checked, is_of_items, is_sorting = (name in one for one in (_CHECKED, _OF_ITEMS, _SORTING))
    is_of_names = name in _OF_NAMES

    if not (takes or is_checked or is_of_items or is_sorting or is_of_names):  # as `upper`

        def of_text(value: Any, *args: Any, **kwargs: Any) -> Any:
            budget = current()
            budget.step()
            budget.spend_on(value)
            made = made_by(value, *args, **kwargs)
            pay_for(budget, made)
            return made

        return of_text

    def check(budget: Budget, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
        value, *rest = args[first:] or (None,)

        def given(keyword: str, place: int, otherwise: Any) -> Any:
            return rest[place] if len(rest) > place else kwargs.get(keyword, otherwise)

        if name in _WIDTHS:
            width = given(*_WIDTHS[name], 4 if name == "indent" else 0)
            check_width(width)
            if name == "indent":
                pay_for_indenting(budget, value, width)
        elif name == "join":
            if not isinstance(value, str):
                value = list(value or ())  # a generator would be empty once it was looked at
            budget.spend_on(between := given("d", 0, ""))
            pay_for_joining(budget, str(between), value)
        elif name == "replace":
            pay_for_replacing(budget, str(value), given("old", 0, ""), given("new", 1, ""))
        elif name == "format":
            pay_for_formatting(budget, str(value), kwargs or rest)
        return (*args[:first], value, *rest)

    def bounded(*args: Any, **kwargs: Any) -> Any:
        budget = current()
        budget.step()
        value = args[first] if len(args) > first else None
        if is_sorting and isinstance(value, Iterator):
            value = list(value)  # it would be empty once it was looked at
            args = (*args[:first], value, *args[first + 1 :])
        if is_of_items:
            pay_for(budget, value)
        else:
            budget.spend_on(value)
        if is_of_names:
            budget.spend_on((args[first + 1 :], kwargs))
        if is_checked:
            args = check(budget, args, kwargs)
        made = made_by(*args, **kwargs)
        pay_for(budget, made)
        return made

    if takes is not None:
        bounded.jinja_pass_arg = takes  # type: ignore[attr-defined]
    return bounded


def _trim(value: Any, chars: str | None = None) -> str:
    """As jinja2 has it, and pays for itself: most templates trim each message."""
    budget = current()
    budget.step()
    if isinstance(value, str):
        budget.spend(len(value))
    else:
        budget.spend_on(value)
        value = str(value)
    made: str = value.strip(chars)
    budget.spend(len(made))
    return made


def _to_json(
    value: Any,
    ensure_ascii: bool = False,  # noqa: FBT001  as templates call it
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,  # noqa: FBT001
) -> str:
    """As transformers has it: without escaping what HTML would want escaped."""
    check_width(indent)
    budget = current()
    budget.spend_on(value)
    encoder = json.JSONEncoder(
        ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
    # What an item is paid for, above, is more than short separators.
    if indent is None and sum(map(len, separators or ())) <= ITEM_CHARACTERS:
        return encoder.encode(value)
    parts = []
    for part in encoder.iterencode(value):  # each line has as many indents as it is deep
        budget.spend(len(part))
        parts.append(part)
    return "".join(parts)


@jinja2.pass_environment
def _sum(
    environment: Environment, iterable: Iterable[Any], attribute: str | int | None = None, start: Any = 0
) -> Any:
    """As jinja2 has it, and each step is paid for: sums of lists grow with each of them."""
    if isinstance(start, str):
        raise TypeError("texts can't be summed")
    made, budget = start, current()
    of = None if attribute is None else make_attrgetter(environment, attribute)
    for one in iterable:
        budget.step()
        made = _add(budget, made, of(one) if of else one)
    return made


def _bounded_test(made_by: Callable[..., Any]) -> Callable[[Any], Any]:
    """A test of the text that a value has."""

    def bounded(value: Any) -> Any:
        current().spend_on(value)
        return made_by(value)

    return bounded


def _raise(message: Any) -> NoReturn:
    current().spend_on(message)
    raise jinja2.TemplateError(message)


def _now(form: str) -> str:
    """Of this machine's clock and zone, as an engine would say it."""
    current().spend(64 * len(form))
    return datetime.now().strftime(form)  # noqa: DTZ005


def plain() -> Environment:
    """As transformers makes it."""
    return ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )


def bounded() -> Environment:
    made = _Bounded(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_Generation, loopcontrols],
        optimized=False,
        finalize=_finalize,
        undefined=Undefined,
    )
    for name in _DROPPED_FILTERS:
        del made.filters[name]
    for name in _DROPPED_GLOBALS:
        del made.globals[name]
    made.filters["tojson"] = _to_json
    made.filters["sum"] = _sum
    made.filters = {name: _bounded_filter(name, one) for name, one in made.filters.items()}
    made.filters["trim"] = _trim
    tests: dict[str, Any] = made.tests
    for name in ("lower", "upper"):
        tests[name] = _bounded_test(tests[name])
    made.globals["raise_exception"] = _raise
    made.globals["strftime_now"] = _now
    return made
