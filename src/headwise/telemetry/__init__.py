"""Telemetry of a training: what its heads do, and means against what goes wrong."""
