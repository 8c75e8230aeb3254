"""The parts of `fronted`: what lies in front of a store, and the work on it."""
