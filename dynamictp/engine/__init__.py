"""The data plane's head: waiting queue, schedulers, pages, prefix cache, and the layout as it is.

Never imports torch. `core.EngineCore` is the engine without transport; `process` runs it over sockets.
"""
