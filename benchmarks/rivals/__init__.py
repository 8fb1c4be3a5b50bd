"""fedem beside rival libraries, the same work in one run; a side imports nothing but torch, numpy and its library."""
