"""What everything stands on: trees, keyed randomness, the mathematics of EM, settings, errors."""

VERSION = "0.1.0"

# How the threads of a step wait for each other, by the variables of the GNU, the LLVM and Intel's OpenMP. Their own way
# is to spin for 3 to 200 ms, on cores that another process or the slowest thread could use. To be said before torch is
# loaded; what a user has said counts alone.
WAITING = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "10000", "KMP_BLOCKTIME": "0"}  # 10,000 are 0.1 ms
