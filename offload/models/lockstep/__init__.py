"""Several calls of one model that share every load of a layer."""
