"""The wire protocol of ART's server, translated to the runs, groups and steps of this backend."""
