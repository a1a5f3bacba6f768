"""plexbench: every policy on the same realised segments in one run; its tables, and the checks that keep them fair."""
