"""The YAML file as typed models. Nothing here imports torch, an HTTP library or a component."""
