"""Pure functions that plugins build on: norms, heads, candidate updates, image priors."""
