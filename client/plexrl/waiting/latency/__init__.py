"""What takes time in a cluster (scheduling, pulling, starting, probing, provisioning), as a client of its API."""
