"""Files of every new project; they are copied, and run outside of the package."""
