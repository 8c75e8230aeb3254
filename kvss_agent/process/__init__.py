"""What every daemon needs: settings, logs, signals, durable files, membership in a fleet."""
