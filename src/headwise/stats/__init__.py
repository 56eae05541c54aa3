"""Read what every head did in a call, or in many."""
