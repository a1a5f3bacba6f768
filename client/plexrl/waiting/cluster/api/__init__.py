"""The Kubernetes REST API: requests in, Kubernetes objects, tables, watches and Status objects out."""
