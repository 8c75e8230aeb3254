from __future__ import annotations

from typing import Any, Final, Literal
from urllib.parse import urlsplit

from django.core.exceptions import ValidationError
from django.core.validators import MaxValueValidator, MinValueValidator, RegexValidator
from django.db import models
from django.db.models import Q
from django.utils import timezone

from console.control.models import Change
from console.fleet.models import NAME, Driver, Named, named
from console.orgs.models import Org
from console.shell.sealed import SealedText
from inference_brain.desired import PER_MINUTE_MAX, SECONDS_MAX, TOKENS_MAX, Limits
from swdriver_shim.desired import PRINTED

MODEL_MAX: Final = 200  # characters of what clients call it
FOLDER_MAX: Final = 500
API_KEY_MAX: Final = 4000
COUNT_MAX: Final = 1_000_000
EMULATOR: Final = "emulator "  # how a driver of one reports its engine, before the version
URL: Final = r"^https?://[^\s/?#@]+(/[^\s?#]*)?$"

printed = RegexValidator(PRINTED, "Printed characters, without control characters.")


class Engine(models.TextChoices):
    VLLM = "vllm", "vLLM"
    SGLANG = "sglang", "SGLang"
    OTHER = "other", "other"

    @property
    def told(self) -> Literal["vllm", "sglang", "other"]:
        """As brains hear of it."""
        if self is Engine.VLLM:
            return "vllm"
        return "sglang" if self is Engine.SGLANG else "other"


class EndpointSource(models.TextChoices):
    DOCUMENT = "document", "here"
    REDIS = "redis", "in Redis"

    @property
    def told(self) -> Literal["document", "redis"]:
        """As brains hear of it."""
        return "redis" if self is EndpointSource.REDIS else "document"


class ServedModel(Named):
    """A model that brains serve. `name` is short, for addresses of pages and of the API."""

    model = models.CharField(
        max_length=MODEL_MAX,
        unique=True,
        validators=[printed],
        help_text="What clients send as “model”.",
    )
    tokens_max = models.PositiveIntegerField(
        validators=[MinValueValidator(1), MaxValueValidator(TOKENS_MAX)],
        help_text="Tokens of a prompt and its answer, at most.",
    )
    tokenizer = models.CharField(
        max_length=FOLDER_MAX,
        blank=True,
        default="",
        validators=[printed],
        help_text="Folder with tokenizer.json on the brains' machines. Empty: placed by load only.",
    )
    for_all_orgs = models.BooleanField(default=True)
    orgs = models.ManyToManyField(Org, related_name="served_models", blank=True)

    class Meta(Named.Meta):
        constraints = [
            *Named.Meta.constraints,
            models.CheckConstraint(name="served_model_tokens", condition=Q(tokens_max__gte=1)),
            models.CheckConstraint(name="served_model_named", condition=~Q(model="")),
        ]

    def snapshot(self) -> dict[str, Any]:
        """What the audit trail keeps of it."""
        return {
            "name": self.name,
            "model": self.model,
            "tokens_max": self.tokens_max,
            "tokenizer": self.tokenizer,
            "orgs": self.org_slugs() if not self.for_all_orgs else "all",
        }

    def org_slugs(self) -> list[str]:
        return sorted(org.slug for org in self.orgs.all())


class Replica(models.Model):
    """An engine that serves a model, over OpenAI's API. Without a driver its cache is guessed at."""

    model = models.ForeignKey(ServedModel, on_delete=models.CASCADE, related_name="replicas")
    name = models.CharField(max_length=63, validators=[named])
    version = models.PositiveIntegerField(default=1, help_text="Counts changes; the ETag.")
    url = models.CharField(
        max_length=500,
        blank=True,
        validators=[RegexValidator(URL, "http:// or https://, a host, and no query or user.")],
        help_text="Without /v1.",
    )
    endpoint = models.CharField(
        max_length=8,
        choices=EndpointSource,
        default=EndpointSource.DOCUMENT,
        help_text="Where brains find its address: here, or in Redis for replicas of workloads.",
    )
    engine = models.CharField(max_length=8, choices=Engine, default=Engine.VLLM)
    driver = models.ForeignKey(
        Driver, on_delete=models.SET_NULL, related_name="replicas", null=True, blank=True
    )
    draining = models.BooleanField(default=False, help_text="It gets no new requests.")
    served_as = models.CharField(
        max_length=MODEL_MAX,
        blank=True,
        default="",
        validators=[RegexValidator(r"^([^\x00-\x1f\x7f]*)$", "Printed characters.")],
        help_text="What the engine calls the model, if that is another name.",
    )
    api_key = SealedText(blank=True, default="", help_text="Sealed at rest.")
    created_at = models.DateTimeField(default=timezone.now)

    class Meta:
        ordering = ("name",)
        constraints = [
            models.UniqueConstraint(name="replica_once", fields=["model", "name"]),
            models.CheckConstraint(name="replica_name", condition=Q(name__regex=NAME)),
            models.CheckConstraint(
                name="replica_url",
                condition=Q(url__regex=r"^https?://") | Q(url="", endpoint=EndpointSource.REDIS),
            ),
            models.CheckConstraint(
                name="replica_endpoint", condition=Q(endpoint__in=EndpointSource.values)
            ),
            models.CheckConstraint(name="replica_engine", condition=Q(engine__in=Engine.values)),
        ]

    def __str__(self) -> str:
        return f"{self.model.name}/{self.name}"

    @property
    def is_guessed(self) -> bool:
        """Whether nobody tells what its cache holds."""
        return self.driver is None or self.driver.model is None

    @property
    def engine_shown(self) -> str:
        """As people know it. To brains an emulator is as any other server with OpenAI's API."""
        is_emulated = self.driver is not None and self.driver.engine.startswith(EMULATOR)
        return EMULATOR.strip() if is_emulated else Engine(self.engine).label

    def clean(self) -> None:
        if self.url and not _is_usable(self.url):
            raise ValidationError({"url": "Its host, or its port, is none."})
        if any(not "\x21" <= character <= "\x7e" for character in str(self.api_key)):
            raise ValidationError({"api_key": "Printed ASCII without blanks."})
        if len(str(self.api_key)) > API_KEY_MAX:
            raise ValidationError({"api_key": f"At most {API_KEY_MAX} characters."})

    def snapshot(self) -> dict[str, Any]:
        """Without the key itself."""
        return {
            "name": self.name,
            "url": self.url,
            "engine": str(self.engine),
            "driver": self.driver.name if self.driver else None,
            "draining": self.draining,
            "served_as": self.served_as,
            "has_api_key": bool(self.api_key),
        }


def _is_usable(url: str) -> bool:
    """Whether brains can ask somebody there."""
    try:
        parts = urlsplit(url)
        return url.isascii() and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


class OrgLimits(models.Model):
    """What an org may ask of brains. An org without a row has the defaults."""

    org = models.OneToOneField(Org, on_delete=models.CASCADE, related_name="routing_limits")
    version = models.PositiveIntegerField(default=1, help_text="Counts changes; the ETag.")
    requests_per_minute = models.PositiveBigIntegerField(null=True, blank=True)
    tokens_per_minute = models.PositiveBigIntegerField(null=True, blank=True)
    concurrent = models.PositiveIntegerField(null=True, blank=True)
    queued = models.PositiveIntegerField(default=Limits().queued)
    weight = models.PositiveIntegerField(default=Limits().weight)
    priority = models.PositiveSmallIntegerField(default=Limits().priority)
    wait_seconds = models.FloatField(default=Limits().wait_seconds)
    # As which brains hear of them. Changes are forgotten after a while.
    change = models.ForeignKey(
        Change, null=True, on_delete=models.DO_NOTHING, db_constraint=False, related_name="+"
    )

    class Meta:
        ordering = ("org",)
        verbose_name_plural = "org limits"
        constraints = [
            models.CheckConstraint(
                name="org_limits_requests",
                condition=Q(requests_per_minute=None)
                | Q(requests_per_minute__gte=1, requests_per_minute__lte=PER_MINUTE_MAX),
            ),
            models.CheckConstraint(
                name="org_limits_tokens",
                condition=Q(tokens_per_minute=None)
                | Q(tokens_per_minute__gte=1, tokens_per_minute__lte=PER_MINUTE_MAX),
            ),
            models.CheckConstraint(
                name="org_limits_concurrent",
                condition=Q(concurrent=None) | Q(concurrent__gte=1, concurrent__lte=COUNT_MAX),
            ),
            models.CheckConstraint(
                name="org_limits_rest",
                condition=Q(queued__lte=COUNT_MAX, weight__gte=1, weight__lte=COUNT_MAX)
                & Q(priority__lte=100, wait_seconds__gt=0, wait_seconds__lte=SECONDS_MAX),
            ),
        ]

    def __str__(self) -> str:
        return f"limits of {self.org.slug}"
