"""What everything stands on: trees, keyed randomness, the mathematics of EM, settings, errors."""

VERSION = "0.1.0"
