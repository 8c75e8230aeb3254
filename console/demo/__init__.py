"""A small fleet with traffic, for `make up`: everything real but the engines, which compute nothing."""
