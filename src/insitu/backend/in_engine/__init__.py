"""The processes of vLLM: code of ours that runs inside them."""
