"""leakbench's defenses: one module per published method, found through entry points."""
