"""What is measured, against which limit or peer. `make bench NAME=…`."""
