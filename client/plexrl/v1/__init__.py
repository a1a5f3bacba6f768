"""Generated from protos/plexrl/v1 by `make proto`; this file alone is written by hand."""
