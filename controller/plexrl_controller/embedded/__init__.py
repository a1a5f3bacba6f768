"""A whole PlexRL on one machine: a private Postgres, a controller and workers, started and watched as child processes.

Knows command lines, files and process ids; nothing of calls, models or scheduling.
"""
