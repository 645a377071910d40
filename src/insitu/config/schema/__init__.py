"""The JSON schema of a configuration file, made from the models."""
