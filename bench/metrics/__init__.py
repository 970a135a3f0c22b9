"""What an attack recovered, and how sure that number is."""
