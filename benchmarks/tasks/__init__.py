"""Four agentic tasks that a 135M-parameter model can be trained on with two cores.

Each module has the agent (`play`), its examples (`rows`) and its reward (`reward`); the YAML beside it names
them. `episode` is the agent without the model: it takes whoever answers, a model or a scripted player.
"""
