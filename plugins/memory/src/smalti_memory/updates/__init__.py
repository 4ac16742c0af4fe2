"""How weights that train are kept and updated: in bf16, and within the backward pass. Importing this imports no torch."""
