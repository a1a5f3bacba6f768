"""Learning to wait: agents that predict how long an operation takes and sleep, rather than block or poll.

An extra (`plexrl[waiting]`): the base install imports nothing from here.
"""
