"""The addresses of requests below /api/: the API's, and those of the pages, which its answers name.

`console.api.middleware` chooses them, so that `console.urls` needs no API: half of what a web process
loads, which its pages and other processes do without.
"""

from __future__ import annotations

from django.urls import path

from console import urls as pages
from console.api.v1 import api
from console.urls import handler400, handler403, handler404, handler500

__all__ = ["handler400", "handler403", "handler404", "handler500", "urlpatterns"]

urlpatterns = [path("api/v1/", api.urls), *pages.urlpatterns]
