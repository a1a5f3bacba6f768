"""plexbench: every policy on the same realised segments in one run; six tables, and the checks that keep them honest."""
