"""A defense played on made-up input: audit, neighbours, conformance."""
