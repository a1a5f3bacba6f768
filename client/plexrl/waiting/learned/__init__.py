"""Waiting learned by reinforcement: an RLVR job whose reward is the clock's."""
