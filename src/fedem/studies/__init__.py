"""Many runs: comparisons, declared experiments, searches, and trials of the theorems."""
