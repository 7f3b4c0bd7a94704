"""What machines cost: prices, spans of cost, and the terms of a rented machine."""
