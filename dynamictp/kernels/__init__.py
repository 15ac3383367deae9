"""The native kernel path: which level to run, and one rank's forward pass as one native call per step."""
