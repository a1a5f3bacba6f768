"""A discrete-event simulator of a cluster, which runs the very policy objects of the live controller."""
