"""One's own training run: what a server saw of it is captured, attacked and scored."""
