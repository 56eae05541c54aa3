"""A small GPT: its model, its training, its text, and one that is built in."""
