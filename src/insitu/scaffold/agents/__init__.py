"""One agent per framework; the chosen one is copied as agent.py and runs outside of the package."""
