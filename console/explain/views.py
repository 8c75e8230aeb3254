from __future__ import annotations

import re
from dataclasses import replace
from typing import Any
from urllib.parse import urlencode

from django import forms
from django.core.exceptions import ValidationError
from django.http import Http404, HttpResponse
from django.shortcuts import redirect, render
from django.urls import reverse

from console.accounts.browser import SignedInRequest, form_page
from console.accounts.roles import Role
from console.explain.services import REQUEST_MAX, Question, explain, recent_requests
from console.orgs.services import get_org
from console.shell.forms import LinesField

TEXT_MAX = 900_000  # a request may have a megabyte
TOKEN_MAX = (1 << 32) - 1
_KEY = re.compile(r"[0-9a-f]{32}")
_WORD = re.compile(r"[^\s,;()\[\]]+")  # accepts lists as programs print them


class ExplainForm(forms.Form):
    """Accepts a request, tokens or keys; no engine names requests by lists of numbers, or by keys."""

    asked = LinesField(
        max_length=TEXT_MAX,
        label="Request, tokens or keys",
        widget=forms.Textarea(attrs={"rows": 4, "spellcheck": "false"}),
        help_text="The id of a request (X-Request-ID of its answer); or two or more tokens, as numbers; "
        "or keys of columns, as 32 hexadecimal digits each. A prompt with images or sound is found by "
        "its request only, since tokens do not tell them apart. The drivers are asked, and nothing is "
        "stored.",
    )
    adapter = forms.CharField(
        max_length=500,
        required=False,
        help_text="The adapter that the model ran with. Not needed for a request.",
    )

    def clean_asked(self) -> Question:
        words = _WORD.findall(self.cleaned_data["asked"])
        if not words:
            raise ValidationError("Enter a request, tokens or keys.")
        if all(map(_KEY.fullmatch, words)):
            return Question(keys=words)
        if len(words) > 1 and all(word.isascii() and word.isdigit() for word in words):
            return Question(tokens=_tokens(words))
        if len(words) > 1:
            raise ValidationError(
                "This is neither a request, tokens nor keys. Tokens are numbers, a request is one word."
            )
        if len(words[0]) > REQUEST_MAX:
            raise ValidationError(f"A request's id has at most {REQUEST_MAX} characters.")
        return Question(request=words[0])


def _tokens(words: list[str]) -> list[int]:
    longest = max(words, key=len)
    if len(longest) > len(str(TOKEN_MAX)) or max(map(int, words)) > TOKEN_MAX:
        raise ValidationError(f"A token is a number from 0 to {TOKEN_MAX}.")
    return [int(word) for word in words]


class LinkForm(forms.Form):
    """The query of a link to this page."""

    request = forms.CharField(max_length=REQUEST_MAX, required=False)
    session = forms.SlugField(max_length=48, required=False)

    def question(self) -> Question | None:
        """None without a request."""
        asked: dict[str, Any] = self.cleaned_data
        return Question(**asked) if asked["request"] else None


@form_page
def show(request: SignedInRequest, slug: str) -> HttpResponse:
    """Explain hits and misses of a prompt. A named request has its own URL; tokens and keys are posted,
    and stored nowhere."""
    org = get_org(request.principal, slug)
    link = LinkForm(request.GET)
    if not link.is_valid():
        raise Http404("There is no such request.")
    question = link.question()
    form = ExplainForm(request.POST or None, initial={"asked": question.request if question else ""})
    if request.method == "POST" and form.is_valid():
        asked: Question = form.cleaned_data["asked"]
        if asked.request:
            there = {"request": asked.request, "session": link.cleaned_data["session"]}
            query = urlencode({name: value for name, value in there.items() if value})
            return redirect(f"{reverse('explain', args=[slug])}?{query}")
        session = link.cleaned_data["session"]
        question = replace(asked, adapter=form.cleaned_data["adapter"], session=session)
    context = {"org": org, "form": form, "question": question, "session": link.cleaned_data["session"]}
    if question:
        context["explained"] = explain(request.principal, slug, question)
    else:
        context["recent_requests"], context["unreachable"] = recent_requests(request.principal, slug)
    context["sees_fleet"] = request.principal.on_platform(Role.VIEWER)
    return render(request, "explain/explain.html", context)
