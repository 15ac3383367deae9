"""Load client, schedules and figures: everything that measures a server from outside.

Nothing here imports torch or the server: the bench speaks HTTP, so that it measures any
OpenAI-compatible server by the same rules.
"""
