"""The REST API's machinery: problems, authentication, pages, ETags, idempotency."""
