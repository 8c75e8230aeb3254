"""What is installed from the wheel."""
