"""`manage.py changepassword`: in place of Django's own, which leaves API tokens alive and no trace."""

from __future__ import annotations

from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser

from console.accounts import services
from console.accounts.models import User
from console.accounts.principal import SYSTEM


class Command(BaseCommand):
    requires_system_checks = ()  # `prepare` has done them; they load every page, which takes a second
    help = (
        "Generate a new password for a user, who has to change it at the next log-in. It is shown once. "
        "All their API tokens, JWTs and browser sessions are revoked, and the audit log says so."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("username", help="as the user logs in, such as admin")

    def handle(self, *_args: Any, username: str, **_options: Any) -> None:
        user = User.objects.filter(username=username.strip().lower()).first()
        if user is None:
            raise CommandError(f"There is no user {username!r}.")
        password = services.reset_password(SYSTEM, user, "by changepassword on the console's machine")
        self.stdout.write(f"New password of {user.username}, shown only once: {password}")
