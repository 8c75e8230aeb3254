"""Served models over REST."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from django.http import HttpResponse
from ninja import Field, Path, Schema

from console.accounts.browser import SignedInRequest
from console.accounts.principal import Authority, Principal
from console.accounts.roles import Role
from console.api.etags import etag, matched, tagged
from console.api.fields import IfMatch, Input, Reason, SearchText
from console.api.idempotency import Answer, with_dry_run
from console.api.pagination import Rows, listing
from console.api.routes import Router, answers
from console.api.shown import NameOf, read
from console.fleet.models import NAME
from console.orgs.api import Slug
from console.orgs.models import SLUG, Org
from console.orgs.services import get_org
from console.routing import services
from console.routing.models import FOLDER_MAX, MODEL_MAX, ServedModel
from inference_brain.desired import TOKENS_MAX
from swdriver_shim.desired import ORGS_MAX

router = Router(tags=["routing"])
NEEDS = [Authority(None, Role.PLATFORM_ADMIN)]

ModelName = Annotated[str, Path(pattern=NAME, max_length=63, description="Short name of the model.")]
ClientName = Annotated[str, Field(min_length=1, max_length=MODEL_MAX, pattern=r"^[^\x00-\x1f\x7f]*$")]
OrgSlugs = Annotated[
    Literal["all"]
    | Annotated[list[Annotated[str, Field(pattern=SLUG, max_length=48)]], Field(max_length=ORGS_MAX)],
    Field(description="The orgs that may use the model, or “all”."),
]


class ReplicaOut(Schema):
    name: str
    version: int = Field(description="Incremented with each change; the ETag.")
    url: str
    engine: Literal["vllm", "sglang", "other"]
    driver: NameOf | None
    guessed: bool = Field(
        validation_alias="is_guessed",
        description="Its cache is guessed at from what was sent to it: it has no driver, or its driver "
        "has not reported a model.",
    )
    draining: bool
    served_as: str = Field(description="What the engine calls the model; empty: the same.")
    has_api_key: bool

    @staticmethod
    def resolve_has_api_key(replica: Any) -> bool:
        return bool(replica.api_key)


class ServedModelOut(Schema):
    name: str
    version: int = Field(description="Incremented with each change; the ETag.")
    model: str = Field(description="What clients send as `model`.")
    tokens_max: int
    tokenizer: str = Field(description="Folder on the brains' machines; empty: placed by load only.")
    orgs: Literal["all"] | list[str]
    replicas: list[ReplicaOut]

    @staticmethod
    def resolve_orgs(model: ServedModel) -> str | list[str]:
        return "all" if model.for_all_orgs else model.org_slugs()


class ServedModelPut(Input):
    model: ClientName
    tokens_max: Annotated[int, Field(ge=1, le=TOKENS_MAX)]
    tokenizer: Annotated[str, Field(max_length=FOLDER_MAX, pattern=r"^[^\x00-\x1f\x7f]*$")] = ""
    orgs: OrgSlugs = "all"
    reason: Reason = ""

    def values(self) -> dict[str, Any]:
        return {"model": self.model, "tokens_max": self.tokens_max, "tokenizer": self.tokenizer}

    def chosen(self, principal: Principal) -> list[Org] | None:
        """Raises Http404 for one that is not there."""
        if self.orgs == "all":
            return None
        return [get_org(principal, slug) for slug in sorted(set(self.orgs))]


class ServedModelIn(ServedModelPut):
    name: Annotated[str, Field(pattern=NAME, max_length=63, examples=["chat"])]


class OrgModelOut(Schema):
    model: str = Field(description="What clients send as `model`.")


def shown(request: SignedInRequest, name: str) -> ServedModelOut:
    return read(ServedModelOut, services.get_model(request.principal, name), request)


@listing(router, "/models", ServedModelOut, 404, by="name")
def list_models(request: SignedInRequest, q: SearchText = "") -> Rows:
    """List served models with their replicas."""
    return services.visible_models(request.principal).filter(name__contains=q)


@router.post("/models", response=answers(ServedModelOut, 404, 409, status=201))
@with_dry_run
def add_model(request: SignedInRequest, payload: ServedModelIn) -> Answer:
    """Serve a model. It has no replicas yet."""
    principal = request.principal
    services.check_may_add(principal)
    orgs = payload.chosen(principal)
    model = services.add_model(
        principal, name=payload.name, values=payload.values(), orgs=orgs, reason=payload.reason
    )
    headers = {"Location": f"/api/v1/models/{model.name}", "ETag": etag(model.version)}
    return Answer(201, NEEDS, shown(request, model.name), headers)


@router.get("/models/{name}", response=answers(ServedModelOut, 404))
def get_model(request: SignedInRequest, response: HttpResponse, name: ModelName) -> ServedModel:
    """Get a served model."""
    return tagged(response, services.get_model(request.principal, name))


@router.put("/models/{name}", response=answers(ServedModelOut, 404, 409, 412, 428))
@with_dry_run
def update_model(
    request: SignedInRequest, name: ModelName, payload: ServedModelPut, if_match: IfMatch
) -> Answer:
    """Change a served model."""
    principal = request.principal
    model = matched(services.for_change(principal, name), if_match)
    orgs = payload.chosen(principal)
    services.update_model(principal, model, values=payload.values(), orgs=orgs, reason=payload.reason)
    return Answer(200, NEEDS, shown(request, name), {"ETag": etag(model.version)})


@router.delete("/models/{name}", response=answers(None, 404, 409, 412, 428, status=204))
@with_dry_run
def remove_model(request: SignedInRequest, name: ModelName, if_match: IfMatch) -> Answer:
    """Stop serving a model.

    Its engines are not ended.
    """
    model = matched(services.for_change(request.principal, name), if_match)
    services.remove_model(request.principal, model)
    return Answer(204, NEEDS)


@router.get("/orgs/{slug}/models", response=answers(list[OrgModelOut], 404))
def list_org_models(request: SignedInRequest, slug: Slug) -> list[dict[str, str]]:
    """List the models that an org may use."""
    return [{"model": name} for name in services.models_for(get_org(request.principal, slug))]
