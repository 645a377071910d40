"""ART's server protocol, translated to this backend's runs, groups and steps."""
