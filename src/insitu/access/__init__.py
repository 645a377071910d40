"""Keys and their scopes: who may do what at the gateway and at the API."""
