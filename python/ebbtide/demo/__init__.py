"""``ebbtide demo``: a small decoder trained with and without offload, and what that changes."""
