"""A simulated Kubernetes cluster on a virtual clock, served over the Kubernetes REST API."""
