"""The way of a defense or attack from a template to a folder that others can rerun."""
