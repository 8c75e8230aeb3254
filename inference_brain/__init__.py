"""The Inference Brain: the way in for requests, each to the replica where its first token comes soonest."""
