"""Renders chat templates as transformers does, within bounds.

A template is a program from a model's folder: it decides what is rendered, and nothing else. Jinja's
immutable sandbox keeps it away from attributes; here are bounds for its steps, its time and what it
makes, since one line of a template can ask for a billion characters:

- turns of loops, calls of macros and of methods are steps, and the clock is looked at now and then;
- what makes strings and lists grow is paid for before it does: `+`, `*`, `%`, filters, methods; `~`,
  slices and the output where they are made;
- widths and counts that filters and methods are given have a maximum.

What remains is one operation of Python at a time, such as a comparison of lists that a template nested
within each other on purpose: that takes as long as it takes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import jinja2

from inference_brain.tokens import environment
from inference_brain.tokens.budget import Budget, spending
from inference_brain.tokens.errors import BadTemplate, TemplateRefused, TemplateTooCostly
from telemetry.decoder import excerpt

TEMPLATE_CHARACTERS_MAX: Final = 1 << 20


class Template:
    """One compiled chat template. Threads may render it at the same time."""

    __slots__ = ("_compiled", "source", "tree")

    def __init__(self, source: str) -> None:
        """Raises BadTemplate."""
        if len(source) > TEMPLATE_CHARACTERS_MAX:
            raise BadTemplate(f"The chat template has more than {TEMPLATE_CHARACTERS_MAX} characters")
        self.source = source
        try:
            self.tree = environment.plain().parse(source)
            self._compiled = environment.bounded().from_string(source)
            # Each rendering copies them, which takes long of the chain of dictionaries that they are.
            self._compiled.globals = dict(self._compiled.globals)
        except jinja2.TemplateError as error:
            raise BadTemplate(f"The chat template is no template: {excerpt(str(error))}") from error
        except RecursionError:
            raise BadTemplate("The chat template is nested too deep") from None

    def render(self, variables: Mapping[str, Any], budget: Budget | None = None) -> str:
        """Raises TemplateRefused for what the template does not accept, and TemplateTooCostly."""
        try:
            with spending(budget or Budget()):
                return self._compiled.render(variables)
        except TemplateTooCostly:
            raise
        except jinja2.TemplateError as error:
            raise TemplateRefused(excerpt(str(error)) or "The chat template refused") from error
        except RecursionError:
            raise TemplateTooCostly("The chat template calls itself too often") from None
        except MemoryError:
            raise TemplateTooCostly("The chat template needs too much memory") from None
        # What a template does with messages of another form than it expects, or jinja2 with arguments
        # of its functions, ends in any of Python's.
        except (
            *(ArithmeticError, AssertionError, AttributeError, LookupError),
            *(NameError, RuntimeError, TypeError, ValueError),
        ) as error:
            raise TemplateRefused(
                f"The chat template can't render these messages: {excerpt(str(error))}"
            ) from error
