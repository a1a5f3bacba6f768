"""`plexrl simulate`: an operator's cluster and workload, or a recorded trace, under any of the policies."""
