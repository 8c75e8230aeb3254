from __future__ import annotations

import pytest
from django.contrib.auth.models import Permission
from django.contrib.contenttypes.models import ContentType

from console.audit.models import AuditEntry
from console.orgs.services import create_org
from tests.conftest import People
from tests.rows import Rows


@pytest.mark.django_db(transaction=True)
def test_rows_that_were_added_changed_or_deleted_are_restored(people: People) -> None:
    before = Rows.of_now()
    create_org(people.principal("platform_admin"), slug="initech", name="Initech")
    assert AuditEntry.objects.exists()
    Permission.objects.all().delete()
    ContentType.objects.filter(app_label="orgs").update(app_label="changed")
    assert Rows.of_now() != before
    before.restore()
    assert Rows.of_now() == before
