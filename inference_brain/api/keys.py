"""Who asks: the org that a key belongs to. What a request says of itself never decides it."""

from __future__ import annotations

from collections.abc import Mapping

from inference_brain.api.errors import no_key, no_such_model, wrong_key
from inference_brain.desired import Desired, OrgSpec, ServedModel
from swdriver_shim.desired import token_hash


def owner_of(org: OrgSpec) -> str:
    """The owner that connections with keys of this org count for."""
    return f"org:{org.name}"


class Callers:
    """Of one desired document."""

    def __init__(self, told: Desired) -> None:
        self._by_hash: Mapping[str, OrgSpec] = told.callers()
        self._orgs = {org.name: org for org in told.orgs}
        self._models = {model.name: model for model in told.models}
        self._of_org: dict[str, Mapping[str, ServedModel]] = {}

    def of_key(self, authorization: str) -> OrgSpec:
        """The org of a header `Authorization: Bearer KEY`. Raises ApiError."""
        scheme, _, key = authorization.partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise no_key()
        found = self._by_hash.get(token_hash(key.strip()))
        if found is None:
            raise wrong_key()
        return found

    def org(self, name: str) -> OrgSpec | None:
        return self._orgs.get(name)

    def models(self, org: OrgSpec) -> Mapping[str, ServedModel]:
        """Those that an org may use, by name."""
        found = self._of_org.get(org.name)
        if found is None:
            found = {
                name: model
                for name, model in self._models.items()
                if model.orgs is None or org.name in model.orgs
            }
            self._of_org[org.name] = found
        return found

    def model(self, org: OrgSpec, name: str) -> ServedModel:
        """Raises ApiError, the same for a model that does not exist and one of others."""
        found = self.models(org).get(name)
        if found is None:
            raise no_such_model(name)
        return found
