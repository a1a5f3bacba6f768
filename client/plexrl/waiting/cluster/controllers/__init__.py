"""What the controller manager of a cluster does: each controller brings what exists closer to what is asked for."""
