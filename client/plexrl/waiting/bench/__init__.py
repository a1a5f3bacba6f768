"""The benchmark of waiting: agents times laws, as a table, learning curves and a report."""
