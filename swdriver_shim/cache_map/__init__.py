"""What a driver reports of its cache, for the brains that route requests.

- `codec`: the messages, shared with brains
- `follower`: keeps in step with the ledger; `chunks`: what of it is reported, and what is pending
- `publisher`: writes messages to Redis
"""
