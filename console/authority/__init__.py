"""The console as an authority: certificates and capabilities for the processes of the fleet."""
