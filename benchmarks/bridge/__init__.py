"""What a cluster gains when agents say how long they will sleep: `python -m benchmarks.bridge`."""
