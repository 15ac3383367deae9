"""DynamicTP: serve large language models with a tensor-parallel degree that follows the traffic."""

__version__ = "0.1.0"
