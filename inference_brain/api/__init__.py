"""OpenAI's API: routes, validation, errors, streams, keys."""
