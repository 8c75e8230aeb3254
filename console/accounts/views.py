from __future__ import annotations

import logging
from datetime import timedelta
from http import HTTPStatus
from urllib.parse import urlsplit

from django.contrib import auth, messages
from django.core.exceptions import ValidationError
from django.forms.models import model_to_dict
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.shortcuts import redirect, render
from django.utils import timezone
from django.utils.http import url_has_allowed_host_and_scheme
from django.views.decorators.csrf import ensure_csrf_cookie
from django.views.decorators.debug import sensitive_post_parameters
from django.views.decorators.http import require_http_methods, require_POST

from console.accounts import credentials, services, throttle, tokens
from console.accounts.browser import SignedInRequest, form_page, post_page, principal_of, read_page
from console.accounts.forms import (
    AdministeredForm,
    LogInForm,
    NewUserForm,
    PasswordForm,
    TokenForm,
    UserForm,
)
from console.accounts.principal import Refused
from console.accounts.roles import Role
from console.orgs.services import visible_orgs
from console.shell import request_context
from console.shell.errors import NotNow
from telemetry.units import counted

log = logging.getLogger(__name__)

ADMINISTERED_MAX = 200  # shown at once; filters find the others


@sensitive_post_parameters("password")
@ensure_csrf_cookie
@require_http_methods(["GET", "HEAD", "POST"])
def log_in(request: HttpRequest) -> HttpResponse:
    target = _safe_target(request)
    if principal_of(request) is not None:
        return HttpResponseRedirect(target)
    form = LogInForm(request.POST or None)
    status = 200
    if request.method == "POST" and form.is_valid():
        username, address = form.cleaned_data["username"], request_context.client_address(request)
        wait = throttle.count_attempt(username, address)
        if wait:
            form.add_error(None, throttle.sentence(wait))
            response = render(
                request, "accounts/log_in.html", {"form": form, "next": target}, status=429
            )
            response["Retry-After"] = str(wait)
            return response
        try:
            user = auth.authenticate(request, **form.cleaned_data)
        except NotNow:  # nobody has looked at it
            throttle.take_back(username, address)
            raise
        if user is not None:
            throttle.forgive(username, address)
            auth.login(request, user)
            return HttpResponseRedirect(target)
        log.warning("a log-in failed, from %s", address)
        form.add_error(None, "Wrong user name or password.")
        status = 401
    return render(request, "accounts/log_in.html", {"form": form, "next": target}, status=status)


@require_POST
def log_out(request: HttpRequest) -> HttpResponse:
    principal = principal_of(request)
    auth.logout(request)
    if principal is not None and principal.user is not None:
        credentials.announce(principal.user)
    messages.info(request, "You are logged out.")
    return redirect("login")


def _safe_target(request: HttpRequest) -> str:
    """Where to go after log-in: only ever to a page of ours."""
    target = request.POST.get("next") or request.GET.get("next") or ""
    if target.startswith("/") and url_has_allowed_host_and_scheme(
        target, allowed_hosts={request.get_host()}, require_https=request.is_secure()
    ):
        parts = urlsplit(target)
        path = f"{parts.path}?{parts.query}" if parts.query else parts.path
        # A browser takes what begins with two slashes for another host.
        return "/" if path.startswith("//") else path
    return "/"


@read_page
def account(request: SignedInRequest) -> HttpResponse:
    user = request.principal.user
    memberships = user.memberships.select_related("org").order_by("org__slug") if user else []
    return render(request, "accounts/account.html", {"memberships": memberships})


@sensitive_post_parameters()
@form_page
def password(request: SignedInRequest) -> HttpResponse:
    user = request.principal.user
    if user is None:  # a browser always has one
        return redirect("login")
    address = request_context.client_address(request)
    form = PasswordForm(request.POST or None, user=user, address=address)
    if request.method == "POST" and form.is_valid():
        try:
            services.change_password(
                request.principal,
                form.cleaned_data["new"],
                revoke_credentials=form.cleaned_data["revoke"],
            )
        except ValidationError as error:
            form.add_error("new", error)
        else:
            auth.update_session_auth_hash(request, user)
            messages.success(request, "Your password is changed. Other browsers are logged out.")
            return redirect("account")
    response = render(request, "accounts/password.html", {"form": form})
    if form.wait_seconds:
        response.status_code = HTTPStatus.TOO_MANY_REQUESTS
        response["Retry-After"] = str(form.wait_seconds)
    return response


@form_page
def list_tokens(request: SignedInRequest) -> HttpResponse:
    """One's tokens. A new one is shown in the answer that made it, and never again."""
    principal = request.principal
    form = TokenForm(request.POST or None, orgs=visible_orgs(principal))
    made = None
    may_administer = tokens.administers(principal)
    if request.method == "POST" and form.is_valid():
        values = form.cleaned_data
        _, made = tokens.issue(
            principal,
            name=values["name"],
            read_only=values["scope"] == "read",
            org=values["org"],
            expires_at=timezone.now() + timedelta(days=values["days"]),
        )
        form = TokenForm(orgs=visible_orgs(principal))
    rows = tokens.sorted_for_display(tokens.own_tokens(principal))[: tokens.ACTIVE_TOKENS_MAX * 2]
    context = {
        "form": form,
        "made": made,
        "tokens": rows,
        "origin": f"{request.scheme}://{request.get_host()}",
        "administers": may_administer,
    }
    return render(request, "accounts/tokens.html", context)


@read_page
def administered_tokens(request: SignedInRequest) -> HttpResponse:
    """Tokens of others, for who may revoke them. Those that still work first."""
    if not tokens.administers(request.principal):
        raise Refused("Admins of orgs and of the platform see the tokens of others.")
    found = tokens.sorted_for_display(tokens.administered_tokens(request.principal))
    form = AdministeredForm(request.GET)
    if form.is_valid():
        found = tokens.filtered(found, user=form.cleaned_data["user"], org=form.cleaned_data["org"])
    rows = found[: ADMINISTERED_MAX + 1]
    context = {"tokens": rows[:ADMINISTERED_MAX], "form": form, "is_cut": len(rows) > ADMINISTERED_MAX}
    return render(request, "accounts/tokens_administered.html", context)


@post_page
def revoke_token(request: SignedInRequest, public_id: str) -> HttpResponse:
    token = tokens.revoke(request.principal, public_id)
    messages.success(request, f"“{token.name}” revoked. Its clients are rejected from now on.")
    return redirect("tokens" if token.user_id == request.principal.user_id else "tokens-administered")


@read_page
def list_users(request: SignedInRequest) -> HttpResponse:
    users = services.list_users(request.principal).prefetch_related("memberships__org")
    return render(request, "accounts/users.html", {"users": users})


@form_page
def new_user(request: SignedInRequest) -> HttpResponse:
    request.principal.check_platform(Role.PLATFORM_ADMIN)
    form = NewUserForm(request.POST or None)
    if request.method == "POST" and form.is_valid():
        user, generated = services.create_user(request.principal, **form.cleaned_data)
        return render(request, "accounts/generated.html", {"subject": user, "password": generated})
    return render(request, "accounts/user_new.html", {"form": form})


@form_page
def edit_user(request: SignedInRequest, username: str) -> HttpResponse:
    user = services.get_user(request.principal, username)
    initial = model_to_dict(user, ["full_name", "email", "platform_role", "is_active"])
    form = UserForm(request.POST or None, initial=initial)
    if request.method == "POST" and form.is_valid():
        services.update_user(request.principal, user, **form.cleaned_data)
        messages.success(request, f"{user.username} is saved.")
        return redirect("users")
    return render(request, "accounts/user_edit.html", {"form": form, "subject": user})


@post_page
def reset_password(request: SignedInRequest, username: str) -> HttpResponse:
    user = services.get_user(request.principal, username)
    generated = services.reset_password(request.principal, user)
    return render(request, "accounts/generated.html", {"subject": user, "password": generated})


@post_page
def revoke_credentials(request: SignedInRequest, username: str) -> HttpResponse:
    user = services.get_user(request.principal, username)
    count = services.revoke_credentials(request.principal, user)
    messages.success(
        request,
        f"{user.username} is logged out everywhere, and "
        f"{counted(count, 'token was', 'tokens were', zero='no')} revoked.",
    )
    return redirect("user", username=user.username)
