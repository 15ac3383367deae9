"""The server: HTTP API, tokens to text, the engine's client, and the processes it supervises."""
