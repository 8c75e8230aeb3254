"""The Inference Brain: the way in for requests, each where its first token comes soonest."""
