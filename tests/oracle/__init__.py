"""Reference values (*.json), and formulas that no product code needs to compute them."""
