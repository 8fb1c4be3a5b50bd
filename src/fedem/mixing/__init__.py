"""The mixers: who averages with whom."""
