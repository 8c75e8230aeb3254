"""The emulator: an engine that computes no KV and no answer, and takes the time that a model takes.

It serves OpenAI's API, with a driver in its process. What is cached, for whom and until when is real,
and so is every byte that is moved: its KV is made from the tokens, so each loaded byte is compared.
"""
