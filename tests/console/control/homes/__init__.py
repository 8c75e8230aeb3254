"""An app for consoles of tests: it says of drivers where they keep columns, as sessions do.

`TESTS_HOMES` is a file of JSON: by driver, the part of its document.
"""
