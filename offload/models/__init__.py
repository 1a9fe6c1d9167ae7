"""How a model runs over streamed layers."""
