"""The control plane: pure policies over snapshots. Never imports torch."""
