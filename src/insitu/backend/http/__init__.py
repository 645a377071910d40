"""The API as a process: the application and its server."""
