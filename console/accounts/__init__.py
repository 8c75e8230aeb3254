"""Who somebody is and what they may do: users, roles, log-in, personal API tokens."""
