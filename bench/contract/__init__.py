"""Messages, defense, attack, events, mechanisms: all that a plugin needs to know."""
