"""The backend `kubernetes`: instances and wsjobs are pods of a namespace."""
