"""Serving on virtual time: an event loop, domains whose steps take what the cost model says, and the
production policies (planner, router) deciding. Pure: no process, no torch, no wall clock.
"""
