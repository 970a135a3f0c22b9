"""Leaderboards from records: rows, terminal, Markdown, CSV and JSON."""
