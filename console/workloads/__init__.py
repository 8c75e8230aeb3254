"""Workloads: models that are served. Intent, revisions and history; `manage.py orchestrate` acts."""
