"""What is under deploy/ and runs elsewhere."""
