"""Write calls down, count them, list them."""
