"""Privacy ledger: mechanism events in, epsilon out."""
