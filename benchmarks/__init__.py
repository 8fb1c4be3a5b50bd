"""Ratios against what people would use instead, measured in one run."""
