"""The standing hostile suite: evil peers, the whole stack that they attack, and what watches it.

Each peer is a module with one subject. How to write one: CONTRIBUTING.md.
"""
