"""`tidegatectl`: the console's REST API at a command line. No Django, nothing else of the console."""
