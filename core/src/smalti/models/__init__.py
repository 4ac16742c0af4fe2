"""Model families: the protocol, and block detection."""
