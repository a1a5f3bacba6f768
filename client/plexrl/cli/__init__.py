"""The `plexrl` command: one module per command.

Each offers `add_parser(subparsers)`, which declares its arguments and sets `run`, a function from the parsed arguments
to the exit status. All are light to import: what a command needs beyond the base install, it imports when it runs.
"""
