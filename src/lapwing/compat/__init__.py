"""Other libraries' names on top of this one, for code that is written for them."""
