"""What a decoder's blocks compute, as data, and from which model that is read."""
