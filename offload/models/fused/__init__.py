"""The fused engine: a transformers decoder computed by this package's own kernels."""
