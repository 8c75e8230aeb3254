from __future__ import annotations

from django.contrib.auth.base_user import AbstractBaseUser, BaseUserManager
from django.core.validators import RegexValidator
from django.db import models
from django.db.models.functions import Lower
from django.utils import timezone
from django.utils.crypto import salted_hmac

from console.accounts.names import TOKEN_NAME_MAX, USERNAME_MAX
from console.accounts.roles import ON_THE_PLATFORM, choices

NAME = r"^[a-z0-9][a-z0-9._-]{0,62}$"
NAME_RULE = "Lower-case letters, digits, dots, dashes and underscores, with a letter or digit first."


class Users(BaseUserManager["User"]):
    def get_by_natural_key(self, username: str | None) -> User:
        """Names are kept in lower case, so log-in does not mind capitals."""
        return self.get(username=(username or "").strip().lower())


class User(AbstractBaseUser):
    """A person, or a machine that acts in its own name. Never deleted, only deactivated."""

    username = models.CharField(
        max_length=USERNAME_MAX,
        unique=True,
        validators=[
            RegexValidator(NAME, "Lower-case letters, digits, dots, dashes and underscores only.")
        ],
    )
    full_name = models.CharField("name", max_length=120, blank=True)
    email = models.EmailField(blank=True)
    platform_role = models.PositiveSmallIntegerField(
        null=True,
        blank=True,
        choices=choices(ON_THE_PLATFORM),
        help_text="What they may do in every org and on the fleet.",
    )
    is_active = models.BooleanField(default=True)
    must_change_password = models.BooleanField(default=False)
    created_at = models.DateTimeField(default=timezone.now, editable=False)
    # Sessions, tokens and JWTs from before it are no longer accepted. None: all are.
    credentials_since = models.DateTimeField(null=True, editable=False)

    USERNAME_FIELD = "username"
    EMAIL_FIELD = "email"

    objects = Users()

    class Meta:
        ordering = ("username",)
        constraints = [
            models.CheckConstraint(
                name="user_platform_role",
                condition=models.Q(platform_role=None)
                | models.Q(platform_role__in=[role.value for role in ON_THE_PLATFORM]),
            ),
            models.CheckConstraint(
                name="user_name_in_lower_case", condition=models.Q(username=Lower("username"))
            ),
        ]

    def __str__(self) -> str:
        return self.full_name or self.username

    def _get_session_auth_hash(self, secret: str | None = None) -> str:
        """Browser sessions end with a new password, and with a later `credentials_since`."""
        found: str = super()._get_session_auth_hash(secret=secret)  # type: ignore[misc]
        if self.credentials_since is None:
            return found
        return salted_hmac(found, self.credentials_since.isoformat(), algorithm="sha256").hexdigest()


class ApiToken(models.Model):
    """A personal API token. Only a hash of its secret is kept."""

    token: str  # its text, only of one that was just made
    user = models.ForeignKey(User, on_delete=models.CASCADE, related_name="tokens")
    name = models.CharField(max_length=TOKEN_NAME_MAX)
    public_id = models.CharField(max_length=12, unique=True)
    secret_sha256 = models.BinaryField(max_length=32)
    read_only = models.BooleanField()
    org = models.ForeignKey(
        "orgs.Org", null=True, blank=True, on_delete=models.CASCADE, related_name="tokens"
    )
    created_at = models.DateTimeField(default=timezone.now)
    expires_at = models.DateTimeField()
    last_used_at = models.DateTimeField(null=True)
    revoked_at = models.DateTimeField(null=True)
    made_by = models.ForeignKey(
        "self",
        null=True,
        on_delete=models.SET_NULL,
        related_name="made",
        help_text="The token that made it. Revoking that one revokes this one.",
    )

    class Meta:
        ordering = ("-created_at", "-id")
        indexes = [models.Index(fields=["user", "-created_at"], name="token_of_user")]

    def __str__(self) -> str:
        return self.name

    @property
    def prefix(self) -> str:
        """The part of the token that may be shown: it names the token and its kind."""
        return f"{'tgr' if self.read_only else 'tgw'}_{self.public_id}"

    @property
    def state(self) -> str:
        if self.revoked_at is not None:
            return "revoked"
        return "expired" if self.expires_at <= timezone.now() else "active"


class FailedLogin(models.Model):
    """How often a log-in failed in the current window, by name and by address."""

    key_sha256 = models.BinaryField(max_length=32, primary_key=True)
    window_ends_at = models.DateTimeField(db_index=True)
    count = models.PositiveIntegerField()

    def __str__(self) -> str:
        return f"{self.count} until {self.window_ends_at:%H:%M:%S}"
