"""Django's settings, derived from `console.environment` and nothing else.

What can be chosen from outside stands in the table there; this module only says what follows.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from console import database_address
from console.broker import broker
from console.environment import (
    PROJECT,
    ConfigurationError,
    Environment,
    Mode,
    Pooler,
    bundled,
    package_folder,
)
from telemetry.version import tidegate_version

EX_CONFIG = 78  # sysexits.h: something was wrong with the configuration

try:
    ENVIRONMENT = Environment.read(os.environ)
except ConfigurationError as error:
    print(f"Tidegate can't start, because of its settings:\n{error}", file=sys.stderr)
    raise SystemExit(EX_CONFIG) from None

EMBEDDED = ENVIRONMENT.mode is Mode.EMBEDDED
SECURE = not EMBEDDED

DEBUG = ENVIRONMENT.debug
SECRET_KEY = ENVIRONMENT.secret_key
SECRET_KEY_FALLBACKS = list(ENVIRONMENT.secret_key_fallbacks)
ALLOWED_HOSTS = [
    *ENVIRONMENT.allowed_hosts,
    *(["localhost", "127.0.0.1", "[::1]", ENVIRONMENT.host] if EMBEDDED else []),
]
CSRF_TRUSTED_ORIGINS = list(ENVIRONMENT.trusted_origins)

# For the files of the API's documentation page. As an app of Django it would be loaded, with a part of
# Django's tests, by processes that serve no API.
NINJA = package_folder("ninja")

INSTALLED_APPS = [
    "console.shell",
    "console.accounts",
    "console.orgs",
    "console.audit",
    "console.alerts",
    "console.operations",
    "console.fleet",
    "console.authority",
    "console.control",
    "console.sessions",
    "console.policies",
    "console.routing",
    "console.workloads",
    "console.api",
    "console.live",
    "console.charts",
    "console.explain",
    "console.saved",
    "console.overview",
    "console.search",
    "console.handover",
    "console.demo",
    "telemetry",
    "channels",
    "django_htmx",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.humanize",
    "django.contrib.messages",
    "django.contrib.sessions",
    "django.contrib.staticfiles",
    "django.forms",  # its widgets, for our form renderer
]

# The innermost one is synchronous, and so Django runs the whole chain and the view in one thread,
# instead of changing threads twice for each of them.
MIDDLEWARE = [
    "console.shell.middleware.request_id",
    "console.shell.middleware.security_headers",
    "django.middleware.security.SecurityMiddleware",
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.middleware.clickjacking.XFrameOptionsMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
    "django_htmx.middleware.HtmxMiddleware",
    "console.shell.middleware.NotNowMiddleware",
    "console.api.middleware.below_api",
]

ROOT_URLCONF = "console.urls"
ASGI_APPLICATION = "console.asgi.application"
APPEND_SLASH = True

TEMPLATES: list[dict[str, Any]] = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "DIRS": [bundled("templates"), NINJA / "templates"],
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.messages.context_processors.messages",
                "console.shell.context.shell",
            ],
            "builtins": [
                "django.templatetags.static",
                "django.contrib.humanize.templatetags.humanize",
                "console.shell.templatetags.components",
                "console.shell.templatetags.console",
                "console.policies.templatetags.policies",
            ],
        },
    }
]
FORM_RENDERER = "console.shell.forms.Renderer"


def _database(parameters: dict[str, str], wait_seconds: float = 10) -> dict[str, Any]:
    """The parameters of an address of PostgreSQL as Django wants them."""
    options: dict[str, Any] = dict(parameters)
    return {
        "ENGINE": "django.db.backends.postgresql",
        "NAME": options.pop("dbname", ""),
        "USER": options.pop("user", ""),
        "PASSWORD": options.pop("password", ""),
        "HOST": options.pop("host", ""),
        "PORT": options.pop("port", ""),
        "CONN_HEALTH_CHECKS": True,
        "DISABLE_SERVER_SIDE_CURSORS": ENVIRONMENT.database_pooler is Pooler.TRANSACTION,
        "OPTIONS": {
            **options,
            # Under ASGI every request may run in a new thread; without a pool each would log in anew.
            "pool": {
                "min_size": 0,
                "max_size": ENVIRONMENT.database_connections_max,
                "timeout": wait_seconds,
                # Each attempt comes after twice the pause of the one before, for so long; then whoever
                # asks begins anew. As by default, for five minutes, a server that was away for an hour
                # would be taken for away for minutes more.
                "reconnect_timeout": wait_seconds,
            },
        },
    }


DATABASES = {"default": _database(database_address.parse(ENVIRONMENT.database_url))}
if ENVIRONMENT.history_url:
    DATABASES["history"] = _database(
        database_address.parse(ENVIRONMENT.history_url, "prefer-standby"), wait_seconds=2
    )
LISTEN_URL = ENVIRONMENT.listen_url or ENVIRONMENT.database_url
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"

REDIS_URL = ENVIRONMENT.redis_url
TELEMETRY_URL = ENVIRONMENT.telemetry_url or REDIS_URL
INGEST_URL = ENVIRONMENT.ingest_url or TELEMETRY_URL
REGISTRAR_URL = ENVIRONMENT.registrar_url
ENDPOINTS_URL = ENVIRONMENT.endpoints_url or TELEMETRY_URL
TOKENIZERS = ENVIRONMENT.tokenizers_dir or ENVIRONMENT.state_dir / "tokenizers"
CLUSTER_URL = ENVIRONMENT.cluster_url or ""
CLUSTER_CA = ENVIRONMENT.cluster_ca
CLUSTER_CERTIFICATE = ENVIRONMENT.cluster_certificate
CLUSTER_KEY = ENVIRONMENT.cluster_key
OWN_TELEMETRY_URL = ENVIRONMENT.own_telemetry_url
OTLP_URL = ENVIRONMENT.otlp_url
STATE_DIR = ENVIRONMENT.state_dir
DEMO = ENVIRONMENT.demo
VERSION = tidegate_version()
PUBLIC_URL = (
    ENVIRONMENT.public_url or (f"http://{ENVIRONMENT.host}:{ENVIRONMENT.port}" if EMBEDDED else "")
).rstrip("/")
SMTP_URL = ENVIRONMENT.smtp_url or ""
MAIL_FROM = ENVIRONMENT.mail_from or ""
LOST_AFTER_SECONDS = ENVIRONMENT.lost_after_seconds
CERTIFICATE_DAYS = ENVIRONMENT.certificate_days
PLAIN_CONTROL = ENVIRONMENT.plain_control
TELEMETRY_DAYS_10S = ENVIRONMENT.telemetry_days_10s
TELEMETRY_DAYS_1M = ENVIRONMENT.telemetry_days_1m
TELEMETRY_DAYS_1H = ENVIRONMENT.telemetry_days_1h
TELEMETRY_HOURS_SLOWEST = ENVIRONMENT.telemetry_hours_slowest

AUTH_USER_MODEL = "accounts.User"
PASSWORD_HASHERS = ["console.accounts.hashing.BoundedArgon2"]
AUTH_PASSWORD_VALIDATORS = [
    {"NAME": f"django.contrib.auth.password_validation.{name}", "OPTIONS": options}
    for name, options in (
        ("UserAttributeSimilarityValidator", {}),
        ("MinimumLengthValidator", {"min_length": 12}),
        ("CommonPasswordValidator", {}),
        ("NumericPasswordValidator", {}),
    )
]
LOGIN_URL = "login"
LOGIN_REDIRECT_URL = "home"
LOGOUT_REDIRECT_URL = "login"

SESSION_ENGINE = "console.accounts.sessions"
SESSION_COOKIE_AGE = ENVIRONMENT.session_hours * 3600
SESSION_COOKIE_NAME = "tidegate_session"
SESSION_COOKIE_SAMESITE = "Lax"
SESSION_COOKIE_SECURE = SECURE
CSRF_COOKIE_NAME = "tidegate_csrf"
CSRF_COOKIE_HTTPONLY = True
CSRF_COOKIE_SECURE = SECURE
CSRF_FAILURE_VIEW = "console.shell.errors.csrf_failure"

SECURE_SSL_REDIRECT = SECURE
# Probes come from inside, without TLS.
SECURE_REDIRECT_EXEMPT = [r"^-/health"]
SECURE_HSTS_SECONDS = ENVIRONMENT.hsts_seconds if SECURE else 0
SECURE_HSTS_INCLUDE_SUBDOMAINS = SECURE
SECURE_HSTS_PRELOAD = SECURE
SECURE_REFERRER_POLICY = "same-origin"
X_FRAME_OPTIONS = "DENY"
if ENVIRONMENT.trusted_proxies:
    SECURE_PROXY_SSL_HEADER = ("HTTP_X_FORWARDED_PROTO", "https")

DATA_UPLOAD_MAX_MEMORY_SIZE = 1024 * 1024
TOKENIZER_BYTES_MAX = 16 * 1024 * 1024  # of an archive that is uploaded
DATA_UPLOAD_MAX_NUMBER_FIELDS = 200

STATIC_URL = "/static/"
STATIC_ROOT = ENVIRONMENT.static_dir
STATICFILES_DIRS = [PROJECT / "console" / "static", NINJA / "static"]
STATICFILES_FINDERS = [
    "django.contrib.staticfiles.finders.FileSystemFinder",
    "django.contrib.staticfiles.finders.AppDirectoriesFinder",
    "console.charts.finder.PlotlyFinder",
]
STORAGES = {
    "default": {"BACKEND": "django.core.files.storage.FileSystemStorage"},
    "staticfiles": {
        "BACKEND": "django.contrib.staticfiles.storage.ManifestStaticFilesStorage"
        if EMBEDDED
        else "servestatic.storage.CompressedManifestStaticFilesStorage"
    },
}

LANGUAGE_CODE = "en-gb"
USE_I18N = False
USE_TZ = True
TIME_ZONE = "UTC"

LOGGING = {
    "version": 1,
    "disable_existing_loggers": False,
    "filters": {"request_id": {"()": "console.shell.logs.RequestIdFilter"}},
    "formatters": {
        "line": {
            "()": "console.shell.logs.LineFormatter",
            "format": "{asctime} {levelname:<7} {name} [{request_id}] {message}",
            "style": "{",
        }
    },
    "handlers": {
        "stderr": {
            "class": "logging.StreamHandler",
            "formatter": "line",
            "filters": ["request_id"],
        }
    },
    # That a driver was told, or that what is done every few seconds was done again, or came too late
    # after a start and was left to the next time, is no news.
    "loggers": {
        name: {"level": "WARNING"}
        for name in (
            *("httpx", "celery.beat", "celery.app.trace"),
            *("celery.worker.strategy", "celery.worker.request"),
        )
    },
    "root": {"handlers": ["stderr"], "level": ENVIRONMENT.log_level.upper()},
}


_BROKER = broker(REDIS_URL)
# Tasks are short and idempotent: taken late, given back when their worker dies, never answered.
CELERY_BROKER_URL = _BROKER.url
CELERY_BROKER_USE_SSL = _BROKER.tls
CELERY_BROKER_CONNECTION_RETRY_ON_STARTUP = True
CELERY_BROKER_CONNECTION_MAX_RETRIES = None  # to start again would find no Redis either
CELERY_BROKER_TRANSPORT_OPTIONS = {
    **_BROKER.options,
    "visibility_timeout": 2 * ENVIRONMENT.task_seconds_max,
    # How often a worker looks for the work of vanished ones. The lock it takes for that must not
    # outlive by minutes a worker that is killed while it holds it.
    "unacked_restore_interval": 5,
    "unacked_restore_throttle": 1,
    "unacked_mutex_expire": 30,
    "global_keyprefix": "tidegate:celery:",
}
CELERY_RESULT_BACKEND = None
CELERY_TASK_IGNORE_RESULT = True
CELERY_TASK_ACKS_LATE = True
CELERY_TASK_REJECT_ON_WORKER_LOST = True
CELERY_TASK_TIME_LIMIT = ENVIRONMENT.task_seconds_max
# Tasks that ask others over the network hold a worker for as long as those take: up to ten seconds, and
# again and again while a purge waits for who does not answer. All else takes milliseconds and goes first
# (0, the default), so that alerts are evaluated whoever is away. What nobody waits for goes last: on a
# machine that is too slow for all of it, operations and policies still arrive. Redis takes the lowest
# number first.
ASKS_OTHERS = 6
CAN_WAIT = 9
CELERY_TASK_ROUTES = {
    "console.alerts.tasks.deliver": {"priority": ASKS_OTHERS},
    "console.control.tasks.push": {"priority": ASKS_OTHERS},
    "console.control.tasks.reconcile": {"priority": ASKS_OTHERS},
    "console.control.tasks.reconcile_unsettled": {"priority": ASKS_OTHERS},
    "console.operations.tasks.advance_operation": {"priority": ASKS_OTHERS},
    "console.sessions.tasks.replace_lost_nodes": {"priority": ASKS_OTHERS},
    "console.authority.tasks.advance": {"priority": CAN_WAIT},
    "console.fleet.tasks.keep_telemetry_users": {"priority": CAN_WAIT},
    "console.fleet.tasks.look_after_retiring_stores": {"priority": CAN_WAIT},
    "console.fleet.tasks.measure_cpu_of_shards": {"priority": CAN_WAIT},
    "console.sessions.tasks.forget_former_homes": {"priority": CAN_WAIT},
    "console.sessions.tasks.look_at_redundancy": {"priority": CAN_WAIT},
}
CELERY_TASK_SERIALIZER = "json"
CELERY_ACCEPT_CONTENT = ["json"]
CELERY_RESULT_ACCEPT_CONTENT = ["json"]
# In memory: a file of pickles would be one more thing to guard, and there is nothing to remember. Every
# task looks at how things are and not at when it last ran.
CELERY_BEAT_SCHEDULER = "console.beat:ElectedScheduler"
# Nobody tells workers over the broker to stop, or asks them what they run.
CELERY_WORKER_ENABLE_REMOTE_CONTROL = False
CELERY_WORKER_PREFETCH_MULTIPLIER = 1
CELERY_WORKER_SOFT_SHUTDOWN_TIMEOUT = 10
CELERY_WORKER_ENABLE_SOFT_SHUTDOWN_ON_IDLE = True
CELERY_WORKER_HIJACK_ROOT_LOGGER = False
CELERY_WORKER_CANCEL_LONG_RUNNING_TASKS_ON_CONNECTION_LOSS = True
CELERY_TIMEZONE = "UTC"
