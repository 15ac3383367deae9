"""Seeing a server: metrics, history, diagnosis, the live page, alerts, traces. Nothing here decides."""
