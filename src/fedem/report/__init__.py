"""Run folders -> tables."""
