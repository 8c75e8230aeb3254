from __future__ import annotations

from typing import Any

from django import forms
from django.contrib.auth.password_validation import password_validators_help_texts
from django.utils.functional import lazy

from console.accounts import throttle
from console.accounts.models import NAME, NAME_RULE, User
from console.accounts.names import USERNAME_MAX
from console.accounts.roles import ON_THE_PLATFORM, Role, choices
from console.orgs.models import SLUG_MAX, Org
from console.shell.errors import NotNow

EXPIRIES = [(30, "30 days"), (90, "90 days"), (366, "a year")]


def _password_field(autocomplete: str, **more: Any) -> forms.CharField:
    widget = forms.PasswordInput(attrs={"autocomplete": autocomplete})
    return forms.CharField(max_length=256, strip=False, widget=widget, **more)


def _rules() -> str:
    return " ".join(password_validators_help_texts())


# Made when they are shown: one of them reads twenty thousand common passwords.
_RULES = lazy(_rules, str)()


class LogInForm(forms.Form):
    username = forms.CharField(
        label="User name",
        max_length=63,
        widget=forms.TextInput(
            attrs={"autocomplete": "username", "autocapitalize": "none", "autofocus": True}
        ),
    )
    password = _password_field("current-password")


class PasswordForm(forms.Form):
    current = _password_field("current-password", label="Current password")
    new = _password_field(
        "new-password",
        label="New password",
        help_text=_RULES,
    )
    again = _password_field("new-password", label="Confirm new password")
    revoke = forms.BooleanField(
        required=False,
        label="Also revoke my API tokens and JWTs",
        help_text="Select this if your password may be known to others. Other browsers are logged out "
        "in any case.",
    )

    def __init__(self, *args: Any, user: User, address: str | None, **kwargs: Any) -> None:
        """`address`: where the form comes from."""
        super().__init__(*args, **kwargs)
        self.user = user
        self.address = address
        self.wait_seconds = 0  # until a current password is looked at again

    def clean_current(self) -> str:
        """Throttled as a log-in is: who has somebody's session may not have their password."""
        current, name = str(self.cleaned_data["current"]), self.user.username
        self.wait_seconds = throttle.count_attempt(name, self.address)
        if self.wait_seconds:
            raise forms.ValidationError(throttle.sentence(self.wait_seconds))
        try:
            is_right = self.user.check_password(current)
        except NotNow:  # nobody has looked at it
            throttle.take_back(name, self.address)
            raise
        if not is_right:
            raise forms.ValidationError("That is not your current password.")
        throttle.forgive(name, self.address)
        return current

    def clean(self) -> None:
        values = self.cleaned_data
        if values.get("new") and values.get("again") and values["new"] != values["again"]:
            self.add_error("again", "The two passwords are not the same.")


class OrgsMixin(forms.Form):
    """Offers only the orgs that the user may see; and no org only to those who may do it for all."""

    def __init__(self, *args: Any, orgs: Any, may_share: bool = True, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        field = self.fields.get("org")
        if isinstance(field, forms.ModelChoiceField):
            field.queryset = orgs
            if not may_share:
                field.required, field.empty_label = True, None


def utc_field(label: str, help_text: str = "") -> forms.DateTimeField:
    widget = forms.DateTimeInput(attrs={"type": "datetime-local"}, format="%Y-%m-%dT%H:%M")
    return forms.DateTimeField(required=False, label=label, widget=widget, help_text=help_text)


def org_field(empty: str, **options: Any) -> Any:
    return forms.ModelChoiceField(
        Org.objects.none(), required=False, empty_label=empty, to_field_name="slug", **options
    )


class TokenForm(OrgsMixin):
    name = forms.CharField(max_length=120, help_text="What it is for, e.g. “resize bot”.")
    scope = forms.ChoiceField(
        choices=[("read", "may read"), ("write", "may read and write")],
        initial="read",
        label="Access",
    )
    org = org_field("everything I may do", label="Scope")
    days = forms.TypedChoiceField(coerce=int, choices=EXPIRIES, initial=90, label="Expires after")


class AdministeredForm(forms.Form):
    user = forms.CharField(max_length=USERNAME_MAX, required=False, label="User name")
    org = forms.CharField(max_length=SLUG_MAX, required=False, label="Org")


class ReasonMixin(forms.Form):
    reason = forms.CharField(
        max_length=500, required=False, label="Reason", help_text="Recorded in the audit trail."
    )


class UserForm(ReasonMixin):
    full_name = forms.CharField(max_length=120, required=False, label="Name")
    email = forms.EmailField(required=False, label="E-mail")
    platform_role = forms.TypedChoiceField(
        coerce=lambda value: Role(int(value)),
        empty_value=None,
        required=False,
        choices=[("", "none: only in their orgs"), *choices(ON_THE_PLATFORM)],
        label="Platform role",
    )
    is_active = forms.BooleanField(required=False, initial=True, label="Active")

    field_order = ["username", "full_name", "email", "platform_role", "is_active", "reason"]


class NewUserForm(UserForm):
    username = forms.RegexField(
        NAME,
        max_length=63,
        label="User name",
        help_text="Lower-case letters, digits, dots, dashes, underscores. Can't be changed later.",
        error_messages={"invalid": NAME_RULE},
    )
    is_active = None  # type: ignore[assignment]

    def clean_username(self) -> str:
        username = str(self.cleaned_data["username"])
        if User.objects.filter(username=username).exists():
            raise forms.ValidationError("There is a user of that name already.")
        return username
