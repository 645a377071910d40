"""The devices of this machine, or of a cluster: how many, how large, how full, and which cannot be used."""
