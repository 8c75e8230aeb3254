from __future__ import annotations

from django.urls import path, register_converter
from django.urls.converters import StringConverter

from console.accounts.models import NAME as USER_NAME
from console.fleet.models import NAME as THING_NAME
from console.shell.view_modules import ViewModule


class UserName(StringConverter):
    regex = USER_NAME.strip("^$")


class ThingName(StringConverter):
    """The name of something of the fleet."""

    regex = THING_NAME.strip("^$")


register_converter(UserName, "user")
register_converter(ThingName, "thing")

accounts = ViewModule("console.accounts.views")
alert_channels = ViewModule("console.alerts.web.channel_views")
alert_rules = ViewModule("console.alerts.web.rule_views")
alerts = ViewModule("console.alerts.web.views")
audit = ViewModule("console.audit.views")
authority = ViewModule("console.authority.views")
charts = ViewModule("console.charts.views")
explain = ViewModule("console.explain.views")
descriptions = ViewModule("console.fleet.pages.descriptions")
fleet = ViewModule("console.fleet.pages.fleet")
membership = ViewModule("console.fleet.pages.membership")
handover = ViewModule("console.handover.views")
dead_letters = ViewModule("console.metrics.dead_letter_views")
metrics = ViewModule("console.metrics.views")
operations = ViewModule("console.operations.views")
orgs = ViewModule("console.orgs.views")
overview = ViewModule("console.overview.views")
callers = ViewModule("console.policies.pages.callers")
platform = ViewModule("console.policies.pages.platform")
policies = ViewModule("console.policies.pages.policies")
proof = ViewModule("console.policies.pages.proof")
policy_history = ViewModule("console.policies.pages.history")
brains = ViewModule("console.routing.pages.brains")
traffic = ViewModule("console.routing.pages.traffic")
served_models = ViewModule("console.routing.pages.models")
saved = ViewModule("console.saved.views")
search = ViewModule("console.search.views")
actions = ViewModule("console.sessions.pages.actions")
drivers = ViewModule("console.sessions.pages.drivers")
rules = ViewModule("console.sessions.pages.rules")
sessions = ViewModule("console.sessions.pages.sessions")
shell = ViewModule("console.shell.views")
buckets = ViewModule("console.workloads.pages.buckets")
tokenizers = ViewModule("console.workloads.pages.tokenizers")
workloads = ViewModule("console.workloads.pages.workloads")
workload_editing = ViewModule("console.workloads.pages.editing")

urlpatterns = [
    path("", overview.home, name="home"),
    path("log-in/", accounts.log_in, name="login"),
    path("log-out/", accounts.log_out, name="logout"),
    path("account/", accounts.account, name="account"),
    path("account/password/", accounts.password, name="password"),
    path("tokens/", accounts.list_tokens, name="tokens"),
    path("tokens/administered/", accounts.administered_tokens, name="tokens-administered"),
    path("tokens/<slug:public_id>/revoke/", accounts.revoke_token, name="token-revoke"),
    path("users/", accounts.list_users, name="users"),
    path("new-user/", accounts.new_user, name="user-new"),
    path("users/<user:username>/", accounts.edit_user, name="user"),
    path("users/<user:username>/reset-password/", accounts.reset_password, name="user-reset"),
    path(
        "users/<user:username>/revoke-credentials/",
        accounts.revoke_credentials,
        name="user-revoke-credentials",
    ),
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
    path("fleet/", fleet.show_fleet, name="fleet"),
    path("fleet/nodes/", fleet.list_nodes, name="fleet-nodes"),
    path("fleet/nodes/<thing:name>/", fleet.show_node, name="fleet-node"),
    path("fleet/nodes/<thing:name>/state/", fleet.set_state, name="fleet-node-state"),
    path("fleet/nodes/<thing:name>/labels/", fleet.set_labels, name="fleet-node-labels"),
    path(
        "fleet/nodes/<thing:name>/stores/<int:store>/drain/",
        fleet.drain_store,
        name="fleet-node-drain-store",
    ),
    path("fleet/boxes/", fleet.list_boxes, name="fleet-boxes"),
    path("fleet/boxes/<thing:name>/", fleet.show_box, name="fleet-box"),
    path("fleet/boxes/<thing:name>/state/", fleet.set_box_state, name="fleet-box-state"),
    path("fleet/drivers/", fleet.list_drivers, name="fleet-drivers"),
    path("fleet/drivers/<thing:name>/", fleet.show_driver, name="fleet-driver"),
    path("fleet/drivers/<thing:name>/claims/", membership.show_claims, name="fleet-driver-claims"),
    path("fleet/drivers/<thing:name>/remove/", drivers.remove, name="fleet-driver-remove"),
    path("fleet/drivers/<thing:name>/orgs/", drivers.edit_orgs, name="fleet-driver-orgs"),
    path("fleet/join/", membership.join, name="fleet-join"),
    path("fleet/join/<slug:public_id>/revoke/", membership.revoke, name="fleet-join-token-revoke"),
    path("fleet/authority/", authority.show, name="fleet-authority"),
    path("fleet/authority/rotate/", authority.rotate, name="fleet-authority-rotate"),
    path("fleet/description/", descriptions.describe, name="fleet-description"),
    path("fleet/description/fleet.yaml", descriptions.export, name="fleet-export"),
    path("alerts/", alerts.list_alerts, name="alerts"),
    path("alerts/<int:alert_id>/", alerts.show_alert, name="alert"),
    path("alerts/<int:alert_id>/acknowledge/", alerts.acknowledge, name="alert-acknowledge"),
    path("alerts/<int:alert_id>/unacknowledge/", alerts.unacknowledge, name="alert-unacknowledge"),
    path("alerts/<int:alert_id>/fix/", alerts.apply_fix, name="alert-fix"),
    path("alerts/<int:alert_id>/assign/", alerts.assign, name="alert-assign"),
    path("alerts/bulk/", alerts.change_many, name="alerts-bulk"),
    path("alerts/history/", alerts.show_history, name="alert-history"),
    path("alerts/silences/", alerts.list_silences, name="alert-silences"),
    path("alerts/silences/<int:silence_id>/end/", alerts.end_silence, name="alert-silence-end"),
    path("alerts/rules/", alert_rules.list_rules, name="alert-rules"),
    path("alerts/rules/<slug:slug>/", alert_rules.show_rule, name="alert-rule"),
    path("alerts/channels/", alert_channels.list_channels, name="alert-channels"),
    path("alerts/new-channel/", alert_channels.new_channel, name="alert-channel-new"),
    path("alerts/channels/<int:channel_id>/", alert_channels.show_channel, name="alert-channel"),
    path("alerts/channels/<int:channel_id>/test/", alert_channels.send_test, name="alert-channel-test"),
    path(
        "alerts/channels/<int:channel_id>/delete/",
        alert_channels.delete_channel,
        name="alert-channel-delete",
    ),
    path("orgs/<slug:slug>/policy/", policies.edit, name="policy"),
    path("orgs/<slug:slug>/policy/preview/", policies.preview, name="policy-preview"),
    path("orgs/<slug:slug>/policy/reach/", policies.show_reach, name="policy-reach"),
    path("orgs/<slug:slug>/policy/model/", policies.choose_model, name="policy-model"),
    path("orgs/<slug:slug>/policy/model/drop/", policies.drop_model, name="policy-model-drop"),
    path("orgs/<slug:slug>/policy/default/", policies.follow_default, name="policy-default"),
    path("orgs/<slug:slug>/policy/history/", policy_history.show_history, name="policy-history"),
    path("orgs/<slug:slug>/policy/<int:number>/restore/", policy_history.restore, name="policy-restore"),
    path(
        "orgs/<slug:slug>/policy/scheduled/<int:number>/take-back/",
        policies.unschedule,
        name="policy-unschedule",
    ),
    path("orgs/<slug:slug>/explain/", explain.show, name="explain"),
    path("orgs/<slug:slug>/limits/", brains.org_limits, name="org-limits"),
    path(
        "-/tokenizers/<str:sha256>/<str:instance>/<str:signature>",
        tokenizers.archive,
        name="tokenizer-archive",
    ),
    path("tokenizers/", tokenizers.list_tokenizers, name="tokenizers"),
    path("tokenizers/<int:number>/delete/", tokenizers.delete_tokenizer, name="tokenizer-delete"),
    path("buckets/", buckets.list_buckets, name="buckets"),
    path("buckets/<int:number>/", buckets.show_bucket, name="bucket"),
    path("buckets/<int:number>/delete/", buckets.delete_bucket, name="bucket-delete"),
    path("workloads/", workloads.list_workloads, name="workloads"),
    path("new-workload/", workload_editing.new_workload, name="workload-new"),
    path("workloads/<thing:name>/", workloads.show_workload, name="workload"),
    path("workloads/<thing:name>/edit/", workload_editing.edit_workload, name="workload-edit"),
    path("workloads/<thing:name>/scale/", workload_editing.scale_workload, name="workload-scale"),
    path("workloads/<thing:name>/restart/", workloads.restart_workload, name="workload-restart"),
    path("workloads/<thing:name>/pause/", workloads.pause_workload, name="workload-pause"),
    path("workloads/<thing:name>/resume/", workloads.resume_workload, name="workload-resume"),
    path("workloads/<thing:name>/undo/", workloads.undo_workload, name="workload-undo"),
    path("workloads/<thing:name>/delete/", workloads.delete_workload, name="workload-delete"),
    path(
        "workloads/<thing:name>/revisions/<int:number>/",
        workloads.show_revision,
        name="workload-revision",
    ),
    path(
        "workloads/<thing:name>/instances/<thing:instance>/",
        workloads.show_instance,
        name="workload-instance",
    ),
    path("routing/", traffic.show, name="routing"),
    path("routing/models/", served_models.list_models, name="routing-models"),
    path("routing/new-model/", served_models.new_model, name="routing-model-new"),
    path("routing/models/<thing:name>/", served_models.show_model, name="routing-model"),
    path("routing/models/<thing:name>/edit/", served_models.edit_model, name="routing-model-edit"),
    path("routing/models/<thing:name>/remove/", served_models.remove_model, name="routing-model-remove"),
    path(
        "routing/models/<thing:name>/new-replica/",
        served_models.new_replica,
        name="routing-replica-new",
    ),
    path(
        "routing/models/<thing:name>/replicas/<thing:replica>/",
        served_models.edit_replica,
        name="routing-replica",
    ),
    path(
        "routing/models/<thing:name>/replicas/<thing:replica>/drain/",
        served_models.drain_replica,
        name="routing-replica-drain",
    ),
    path(
        "routing/models/<thing:name>/replicas/<thing:replica>/remove/",
        served_models.remove_replica,
        name="routing-replica-remove",
    ),
    path("routing/brains/", brains.list_brains, name="routing-brains"),
    path("routing/brains/<thing:name>/", brains.show_brain, name="routing-brain"),
    path("routing/brains/<thing:name>/remove/", brains.remove_brain, name="routing-brain-remove"),
    path("orgs/<slug:slug>/callers/", callers.show_callers, name="callers"),
    path(
        "orgs/<slug:slug>/callers/<slug:public_id>/remove/",
        callers.remove_caller,
        name="caller-remove",
    ),
    path("orgs/<slug:slug>/retention/", proof.show, name="retention"),
    path("orgs/<slug:slug>/retention/report.csv", proof.as_csv, name="retention-csv"),
    path("orgs/<slug:slug>/retention/report.json", proof.as_json, name="retention-json"),
    path("orgs/<slug:slug>/purge/", proof.purge, name="purge"),
    path("policies/", platform.list_policies, name="policies"),
    path("policies/bulk/", platform.edit_many, name="policies-bulk"),
    path("policies/default/", platform.edit_cluster, name="policies-cluster"),
    path("audit/", audit.list_entries, name="audit"),
    path("audit/export.csv", audit.export, name="audit-csv"),
    path("audit/<int:entry_id>/", audit.show_entry, name="audit-entry"),
    path("audit/<int:entry_id>/undo/", audit.undo, name="audit-undo"),
    path("orgs/<slug:slug>/session-rules/", rules.org_rules, name="org-session-rules"),
    path("session-rules/", rules.cluster_rules, name="session-rules"),
    path("sessions/", sessions.list_sessions, name="sessions"),
    path("new-session/", sessions.new_session, name="session-new"),
    path("sessions/<slug:name>/", sessions.show_session, name="session"),
    path("sessions/<slug:name>/resize/", sessions.resize_session, name="session-resize"),
    path("sessions/<slug:name>/delete/", sessions.delete_session, name="session-delete"),
    path("sessions/<slug:name>/new-job/", actions.start_job, name="session-job-new"),
    path("sessions/<slug:name>/jobs/<slug:job>/end/", actions.end_job, name="session-job-end"),
    path("sessions/<slug:name>/move/", actions.move, name="session-move"),
    path("sessions/<slug:name>/restore-rails/", actions.restore_rails, name="session-restore-rails"),
    path("fleet/nodes/<thing:name>/drain/", actions.drain, name="node-drain"),
    path("fleet/nodes/<thing:name>/upgrade/", actions.upgrade, name="node-upgrade"),
    path("fleet/boxes/<thing:name>/drain/", actions.drain_box, name="box-drain"),
    path("operations/", operations.list_operations, name="operations"),
    path("operations/<uuid:operation_id>/", operations.show_operation, name="operation"),
    path("operations/<uuid:operation_id>/cancel/", operations.cancel, name="operation-cancel"),
    path("operations/<uuid:operation_id>/retry/", operations.retry, name="operation-retry"),
    path("latency/", charts.latency, name="latency"),
    path("views/", saved.list_views, name="views"),
    path("views/<int:number>/delete/", saved.delete_view, name="view-delete"),
    path("latency/events/", charts.latency_events, name="latency-events"),
    path("latency/slowest/", charts.slowest, name="latency-slowest"),
    path("hand-over/", handover.hand_over, name="hand-over"),
    path("search/", search.search, name="search"),
    path("-/health", shell.ready, name="health"),
    path("-/health/live", shell.live, name="health-live"),
    path("metrics", metrics.show, name="metrics"),
    path("dead-letters/", dead_letters.show, name="dead-letters"),
    path("-/versions", shell.show_versions, name="versions"),
    path("-/design", shell.design, name="design"),
]

handler400 = "console.shell.errors.bad_request"
handler403 = "console.shell.errors.forbidden"
handler404 = "console.shell.errors.not_found"
handler500 = "console.shell.errors.server_error"
