"""The four roles, in the order of what they may do."""

from __future__ import annotations

from django.db import models


class Role(models.IntegerChoices):
    """Each role may do all that the ones before it may.

    A role is held in an org (a membership) or on the whole platform (on the user). ORG_ADMIN exists
    only in an org, PLATFORM_ADMIN only on the platform; the database holds both to that.
    """

    VIEWER = 1, "viewer"
    ON_CALL = 2, "on-call"
    ORG_ADMIN = 3, "org admin"
    PLATFORM_ADMIN = 4, "platform admin"


IN_AN_ORG = (Role.VIEWER, Role.ON_CALL, Role.ORG_ADMIN)
ON_THE_PLATFORM = (Role.VIEWER, Role.ON_CALL, Role.PLATFORM_ADMIN)


def choices(roles: tuple[Role, ...]) -> list[tuple[int, str]]:
    return [(role.value, role.label) for role in roles]
