"""Simulation of federated protocols: train a model under a defense, record what is seen."""
