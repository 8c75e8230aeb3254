"""The load tool: traces played against any endpoint with OpenAI's API, and what came of it."""
