"""Keys and values of past tokens, on the compute device and in CPU memory."""
