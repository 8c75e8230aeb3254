"""Fuzzing: plain functions over the decoders, and the inputs that were worth keeping.

`make fuzz` looks for new ones, guided by coverage; the ordinary suite replays those of `corpus/`.
"""
