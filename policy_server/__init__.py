"""Deep policies: exported whole, and served at control-loop latency."""
