"""What runs inside the processes of vLLM."""
