"""The brain's metrics, for Prometheus and for telemetry. Names and meanings: docs/metrics.md."""

from __future__ import annotations

from typing import Final

from telemetry.metrics import Catalog

METRICS: Final = Catalog()
_counter, _gauge, _histogram = METRICS.counter, METRICS.gauge, METRICS.histogram

# Of the process

UP_SINCE = _gauge("brain_up_since_seconds", "When the brain started, in seconds since 1970.")
READY = _gauge("brain_ready", "1 when it has a desired document and serves requests.")
GENERATION = _gauge(
    "brain_generation", "Generation of the desired document: desired and observed.", "which"
)
CONSOLE = _counter(
    "brain_console_calls_total",
    "Requests to join the console's fleet and heartbeats, by result.",
    "what",
)
HTTP_CONNECTIONS = _gauge(
    "brain_http_connections",
    "Connections of the control API, by whether they have shown a token.",
    "peer",
)
HTTP_REFUSED = _counter(
    "brain_http_refused_total",
    "Connections of the control API that were closed, by the limit that was reached.",
    "bound",
)
REDIS = _gauge("brain_redis_connected", "1 while Redis answers; without it maps age.")

# Of requests

# None by org and replica: all pairs of them are more series than a process can report.

REQUESTS = _counter("brain_requests_total", "Requests, by result.", "org", "model", "result")
REJECTED = _counter(
    "brain_rejected_requests_total",
    "Requests that were answered 429 or 503, by reason: rate, tokens, concurrent, queue, "
    "overloaded, deadline or no_replica.",
    "org",
    "reason",
)
TOKENS = _counter(
    "brain_tokens_total", "Tokens served, by kind: prompt, cached or completion.", "org", "kind"
)
TTFT = _histogram(
    "brain_ttft_seconds", "Time to first token, from the request's arrival.", "org", "model"
)
STREAMS = _gauge("brain_streams", "Answers that are being streamed to clients.")
RETRIES = _counter(
    "brain_retries_total", "Requests that were sent to another replica, by why.", "model", "reason"
)

# Of decisions

DECISION = _histogram("brain_decision_seconds", "Duration of choosing a replica.")
LOOKUP = _histogram("brain_lookup_seconds", "Duration of looking a prompt up in all cache maps.")
TOKENIZE = _histogram("brain_tokenize_seconds", "Duration of rendering and tokenizing a prompt.")
TOKENIZED = _counter(
    "brain_tokenized_tokens_total",
    "Tokens of prompts, by how they were had: computed, or reused from earlier turns.",
    "how",
)
TOKENIZERS_STOPPED = _counter(
    "brain_tokenizers_stopped_total",
    "Processes of uploaded tokenizers that were replaced: they took too much time or memory.",
)
PREDICTED_HIT = _counter(
    "brain_predicted_hit_tokens_total",
    "Tokens that the chosen replica was expected to hit.",
    "org",
    "model",
)
ACTUAL_HIT = _counter(
    "brain_actual_hit_tokens_total",
    "Tokens that replicas reported as hit, of the same requests.",
    "org",
    "model",
)
ESTIMATE_ERROR = _histogram(
    "brain_estimate_error_seconds",
    "Absolute difference between estimated and actual time to first token.",
    "model",
    "replica",
)
FALLBACK = _gauge(
    "brain_affinity_fallback",
    "1 while estimates for a model are off, and its requests are placed by affinity.",
    "model",
)
REGRET = _counter(
    "brain_regret_tokens_total",
    "Tokens that were computed although an ideal cache would have hit them, by cause: cold, expired, "
    "displaced, not_lent, purged, overloaded, spine or elsewhere.",
    "org",
    "cause",
)
SINGLE_FLIGHT = _counter(
    "brain_single_flight_total",
    "Requests with a long uncached prefix that others had as well: led, waited or gave_up.",
    "what",
)
PREFETCH = _counter(
    "brain_prefetch_total",
    "Prompts that drivers were asked to recall from tier 2 while requests were queued: asked, repeated, "
    "too_many or failed.",
    "what",
)
BORROWS = _counter(
    "brain_borrow_requests_total",
    "Prompts that drivers were asked to borrow from a sibling: asked, repeated, too_many or failed.",
    "what",
)

# Of queues

QUEUED = _gauge("brain_queue_requests", "Requests in the queue of an org.", "org")
QUEUE = _histogram("brain_queue_seconds", "Time that requests of an org were queued.", "org")
FAIRNESS_GAP = _gauge(
    "brain_fairness_gap_tokens",
    "Largest difference between the weighted tokens served to two orgs that both have queued requests.",
)

# Of replicas and cache maps

REPLICA_STATE = _gauge(
    "brain_replica_state",
    "1 for the state that a replica is in: ready, slow_start, ejected, draining, unreachable or "
    "no_endpoint.",
    "model",
    "replica",
    "state",
)
REFUSED: Final = "refused"
REFUSED_AGAIN: Final = "refused_again"
FULL: Final = "full"
UNANSWERED: Final = "unanswered"
REPLICA_RESULTS = _counter(
    "brain_replica_results_total",
    "Requests that were sent to a replica, by result; refused: it answered with an error, and another "
    "one did not; refused_again: so it did, with the same org as the time before, while others send "
    "requests, too, and it fails none of them; full: it answered 503 with Retry-After, and another one "
    "did not; unanswered: others failed as well, and no replica served "
    "the request. What ends at an instance that was replaced does not count.",
    "model",
    "replica",
    "result",
)
REPLICA_TTFT = _histogram(
    "brain_replica_ttft_seconds",
    "Time to first token of a replica's requests, from their arrival.",
    "model",
    "replica",
)
REPLICA_REQUESTS = _gauge(
    "brain_replica_requests", "Requests of this brain in progress on a replica.", "model", "replica"
)
ENDPOINTS_AGE = _gauge(
    "brain_endpoints_age_seconds",
    "Time since endpoints of a model's replicas were last read from Redis; while it has none they stay.",
    "model",
)
MAP_AGE = _gauge(
    "brain_map_age_seconds",
    "Time since the cache map of a driver was last updated, or since the brain began to follow it.",
    "driver",
)
MAP_COLUMNS = _gauge(
    "brain_map_columns", "Columns that a driver's cache map stands for: eight for each entry.", "driver"
)
MAP_BYTES = _gauge("brain_map_bytes", "Memory of all cache maps.")
MAP_GAPS = _counter(
    "brain_map_gaps_total", "Gaps in the updates of a driver's map, which is then read again.", "driver"
)
