"""Agents that wait: one interface, an observation and a history in, a code action out."""
