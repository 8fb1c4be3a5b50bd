"""Federated learning of personalised models as mixtures."""
