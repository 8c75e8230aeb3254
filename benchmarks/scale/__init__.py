"""A fleet at internet scale, simulated: what each part costs by size, and what breaks first."""
