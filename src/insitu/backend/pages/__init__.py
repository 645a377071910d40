"""The web application at the API: its files, the login, and the answers that only its pages need."""
