"""Batched optimisers and gradient matching, shared by the optimising attacks."""
