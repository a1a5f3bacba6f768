"""The controller's version, and the oldest client that it talks to."""

from importlib.metadata import version

VERSION = version("plexrl")
OLDEST_CLIENT = (0, 1)
