"""Long work: resumable state machines in PostgreSQL, with progress, cancel and a way back."""
