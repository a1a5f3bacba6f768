"""Three real jobs on one real worker, and whether the simulator foretells what sharing costs each of them."""
