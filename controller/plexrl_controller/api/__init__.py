"""The controller's gRPC services: one file each, thin over `dispatch`."""
