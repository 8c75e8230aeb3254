from __future__ import annotations

from dataclasses import replace
from urllib.parse import urlencode

from django.http import Http404, HttpResponse
from django.shortcuts import redirect, render
from django.urls import reverse

from console.accounts.browser import SignedInRequest, form_page
from console.accounts.roles import Role
from console.explain.forms import ExplainForm, LinkForm
from console.explain.services import Question, explain, recent_requests
from console.orgs.services import get_org


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
