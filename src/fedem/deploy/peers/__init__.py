"""Among peers, without a server: how they meet, who averages with whom, and a peer at work."""
