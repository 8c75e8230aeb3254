from __future__ import annotations

from django.urls import path, register_converter

from console.accounts import views as accounts
from console.accounts.converters import UserNameConverter
from console.api.v1 import api
from console.audit import views as audit
from console.metrics import views as metrics
from console.operations import views as operations
from console.orgs import views as orgs
from console.shell import views as shell

register_converter(UserNameConverter, "user")

urlpatterns = [
    path("", shell.home, name="home"),
    path("log-in/", accounts.log_in, name="login"),
    path("log-out/", accounts.log_out, name="logout"),
    path("account/", accounts.account, name="account"),
    path("account/password/", accounts.password, name="password"),
    path("tokens/", accounts.list_tokens, name="tokens"),
    path("tokens/<slug:public_id>/revoke/", accounts.revoke_token, name="token-revoke"),
    path("users/", accounts.list_users, name="users"),
    path("new-user/", accounts.new_user, name="user-new"),
    path("users/<user:username>/", accounts.edit_user, name="user"),
    path("users/<user:username>/reset-password/", accounts.reset_password, name="user-reset"),
    path("orgs/", orgs.list_orgs, name="orgs"),
    path("new-org/", orgs.new_org, name="org-new"),
    path("orgs/<slug:slug>/", orgs.show_org, name="org"),
    path("orgs/<slug:slug>/edit/", orgs.edit_org, name="org-edit"),
    path("orgs/<slug:slug>/delete/", orgs.delete_org, name="org-delete"),
    path("orgs/<slug:slug>/members/", orgs.set_member, name="org-member"),
    path(
        "orgs/<slug:slug>/members/<user:username>/remove/",
        orgs.remove_member,
        name="org-member-remove",
    ),
    path("audit/", audit.list_entries, name="audit"),
    path("audit/export.csv", audit.export, name="audit-csv"),
    path("audit/<int:entry_id>/", audit.show_entry, name="audit-entry"),
    path("audit/<int:entry_id>/undo/", audit.undo, name="audit-undo"),
    path("operations/", operations.list_operations, name="operations"),
    path("operations/<uuid:operation_id>/", operations.show_operation, name="operation"),
    path("operations/<uuid:operation_id>/cancel/", operations.cancel, name="operation-cancel"),
    path("operations/<uuid:operation_id>/retry/", operations.retry, name="operation-retry"),
    path("-/health", shell.ready, name="health"),
    path("-/health/live", shell.live, name="health-live"),
    path("metrics", metrics.show, name="metrics"),
    path("-/versions", shell.show_versions, name="versions"),
    path("-/design", shell.design, name="design"),
    path("api/v1/", api.urls),
]

handler400 = "console.shell.errors.bad_request"
handler403 = "console.shell.errors.forbidden"
handler404 = "console.shell.errors.not_found"
handler500 = "console.shell.errors.server_error"
