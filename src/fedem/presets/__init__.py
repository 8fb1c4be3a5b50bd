"""Shipped settings: a TOML file a data set."""
