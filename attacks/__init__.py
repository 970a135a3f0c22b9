"""leakbench's attacks: one module per published method, found through entry points."""
