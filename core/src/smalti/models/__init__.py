"""Model families: the protocol, block detection, and the toy family that needs torch alone."""
