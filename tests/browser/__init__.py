"""The pages in a real Chromium, against a real server process. They never touch the ORM: the sync
Playwright runs an event loop in this thread, and everything is done as a person does it."""
