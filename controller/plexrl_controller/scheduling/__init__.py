"""Scheduling decisions: pure functions of immutable views, run by the live controller and the simulator alike."""
