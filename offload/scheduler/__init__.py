"""When bytes move: pure decisions, with no CUDA call and no file access in them."""
