"""The methods, one file each, on the contract of :mod:`fedem.algorithms.base`."""
