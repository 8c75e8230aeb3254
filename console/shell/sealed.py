"""Secrets at rest: encrypted fields, so that a copy of the database reveals none.

The keys come from the secret key of the settings and its fallbacks, by HKDF, so that they are of no use
for anything else. What a former secret key sealed can be opened for as long as that is a fallback; it is
sealed anew whenever its row is saved, and `manage.py reseal` does so for all.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from django.apps import apps
from django.conf import settings
from django.core.exceptions import FieldError
from django.db import models

if TYPE_CHECKING:
    from cryptography.fernet import MultiFernet

    TextField = models.TextField[Any, Any]
else:
    TextField = models.TextField

PURPOSE = b"tidegate: secrets at rest, 1"


class CannotUnseal(Exception):
    """Sealed with a secret key that is no longer set, or altered."""

    def __init__(self) -> None:
        super().__init__(
            "A stored secret can't be opened. If TIDEGATE_SECRET_KEY was changed, add the former one to "
            "TIDEGATE_SECRET_KEY_FALLBACKS."
        )


def seal(secret: bytes) -> str:
    """Encrypt a secret as text for a column; each call gives another text."""
    return _keys().encrypt(secret).decode()


def unseal(text: str) -> bytes:
    """Decrypt a sealed secret. Raises CannotUnseal."""
    from cryptography.fernet import InvalidToken  # see `_fernets`

    try:
        return _keys().decrypt(text)
    except InvalidToken:
        raise CannotUnseal from None


class SealedBytes(TextField):
    """Bytes that the database stores sealed. They can be read and written, but not searched for.

    Empty is stored as it is: that there is no secret is none.
    """

    def from_db_value(self, value: str | None, *_: Any) -> bytes | None:
        return unseal(value) if value else None if value is None else b""

    def to_python(self, value: Any) -> Any:
        return value

    def get_prep_value(self, value: Any) -> str | None:
        return seal(bytes(value)) if value else None if value is None else ""

    def get_lookup(self, lookup_name: str) -> Any:
        """Only `isnull` is possible, since each sealed text is different."""
        if lookup_name == "isnull":
            return super().get_lookup(lookup_name)
        raise FieldError(f"{self.name} is sealed and cannot be searched for.")


class SealedText(SealedBytes):
    """Text that the database stores sealed."""

    def from_db_value(self, value: str | None, *_: Any) -> Any:
        opened = super().from_db_value(value)
        return None if opened is None else opened.decode()

    def get_prep_value(self, value: Any) -> str | None:
        return super().get_prep_value(value if value is None else str(value).encode())


def sealed_rows() -> Iterator[tuple[models.QuerySet[Any], list[str]]]:
    """The rows of each model that have a secret, and the names of the fields that may. Of a day's stored
    answers few have one."""
    for model in apps.get_models():
        names = [field.name for field in model._meta.fields if isinstance(field, SealedBytes)]  # noqa: SLF001
        if names:
            none = {f"{name}__isnull": True for name in names}
            yield model._default_manager.exclude(**none).order_by("pk"), names  # noqa: SLF001


def _keys() -> MultiFernet:
    return _fernets(settings.SECRET_KEY, *settings.SECRET_KEY_FALLBACKS)


@lru_cache(maxsize=8)
def _fernets(*secret_keys: str) -> MultiFernet:
    """The keys: the first one encrypts, all of them decrypt."""
    from cryptography.fernet import Fernet, MultiFernet  # every process has the models, few open secrets

    return MultiFernet([Fernet(base64.urlsafe_b64encode(derived(key, PURPOSE))) for key in secret_keys])


def derived(secret_key: str, purpose: bytes) -> bytes:
    """A key for one purpose, which is of no use for any other."""
    from cryptography.hazmat.primitives.hashes import SHA256  # see `_fernets`
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    return HKDF(algorithm=SHA256(), length=32, salt=None, info=purpose).derive(secret_key.encode())
