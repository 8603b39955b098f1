"""What is trained: configuration, transformer, experts, loss of a token, decoding and name maps."""
