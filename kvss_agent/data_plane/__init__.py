"""The data plane: frames, handshake, connections, and the listeners that accept them."""
